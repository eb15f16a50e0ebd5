"""The timeline: slices on places that nobody shares, tokens that add up, arrows that lead on."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import InstanceJoined, InstanceLost, RequestFinished, Woke
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.timeline import COLOURS, TimelineFold
from rollout_sched.metrics.folded import Folded
from tests.inspection.journals import recorded

Events = list[dict[str, Any]]


def drawn(path: Path) -> Events:
    fold = TimelineFold()
    return fold.events(Recording(path).tell([Folded(fold.spans, fold).observe]))


def of(events: Events, phase: str) -> Events:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("policy", ["dplb", "areal", "partial_rollout"])
def test_a_run(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(path, policy, trace="lrm_math_open")
    events = drawn(path)
    slices = of(events, "X")
    made = sum(step.generated_tokens for step in run.steps)
    assert sum(event["args"]["tokens"] for event in slices) == made
    names = {event["pid"]: event["args"]["name"] for event in of(events, "M")}
    assert len(names) == 1 + 6
    assert {event["pid"] for event in events} <= names.keys()
    places: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in slices:
        assert event["dur"] >= 0
        places[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in places.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-3  # microseconds
    assert len(of(events, "s")) == len(of(events, "f"))
    assert (policy == "dplb") == (not of(events, "s"))
    assert {event["name"] for event in of(events, "C")} >= {"requests", "KV cache used"}


class TestByHand:
    def fold(self, *entries: tuple[float, Any]) -> Events:
        fold = TimelineFold()
        folded = Folded(fold.spans, fold)
        for now, said in entries:
            acted = isinstance(said, Dispatch)
            folded.observe(now, Woke() if acted else said, [said] if acted else [])
        return fold.events(10.0)

    def test_an_attempt_over_two_versions_is_two_slices_in_two_colours(self) -> None:
        events = self.fold(
            (0.0, InstanceJoined("i", 2, 1000, 3)),
            (1.0, Dispatch("a", 1, "i", 10, 40, 3)),
            (5.0, RequestFinished("a", 1, 40, ((3, 10), (4, 30)))),
        )
        first, second = of(events, "X")
        assert (first["ts"], first["dur"], first["args"]["tokens"]) == (1e6, 1e6, 10)
        assert (second["ts"], second["dur"], second["args"]["version"]) == (2e6, 3e6, 4)
        assert (first["cname"], second["cname"]) == (COLOURS[3], COLOURS[4])

    def test_what_a_lost_instance_held_ends_there_and_goes_on_elsewhere(self) -> None:
        events = self.fold(
            (0.0, InstanceJoined("i", 2, 1000)),
            (0.0, InstanceJoined("j", 2, 1000)),
            (1.0, Dispatch("a", 1, "i", 10, 40, 0)),
            (2.0, InstanceLost("i", "gone")),
            (3.0, Dispatch("a", 2, "j", 15, 35, 0, response_tokens=5, computed_tokens=15)),
        )
        lost, running = of(events, "X")
        assert lost["args"]["outcome"] == "lost: gone"
        assert running["args"]["outcome"] == "still running"
        assert running["ts"] + running["dur"] == 10e6
        [start], [end] = of(events, "s"), of(events, "f")
        assert (start["id"], start["pid"]) == (end["id"], lost["pid"])
        assert (end["pid"], end["ts"]) == (running["pid"], 3e6)
