"""The timeline: slices on places that nobody shares, tokens that add up, arrows that lead on."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.cli import main
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import InstanceJoined, InstanceLost, RequestFinished, Woke
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.timeline import COLOURS, TimelineFold, journal_page
from rollout_sched.metrics.fold import Folded
from tests.inspection.journals import recorded
from tests.page.test_run_page import data_of

Events = list[dict[str, Any]]


def drawn(path: Path) -> Events:
    fold = TimelineFold()
    return fold.events(Recording(path).tell([Folded(fold.spans, fold).observe]))


def of(events: Events, phase: str) -> Events:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("policy", ["dplb", "areal", "april"])
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

    def test_attempts_of_a_lost_instance_continue_elsewhere(self) -> None:
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


#: What each phase must have besides "ph", "name" and "pid", and the types ("Trace Event Format",
#: Google, 2016, which Perfetto and chrome://tracing read).
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "M": {"args": (dict,)},
    "X": {"ts": (float, int), "dur": (float, int), "tid": (int,), "cat": (str,), "args": (dict,)},
    "C": {"ts": (float, int), "args": (dict,)},
    "i": {"ts": (float, int), "tid": (int,), "s": (str,), "args": (dict,)},
    "s": {"ts": (float, int), "tid": (int,), "id": (int,), "cat": (str,)},
    "f": {"ts": (float, int), "tid": (int,), "id": (int,), "cat": (str,), "bp": (str,)},
}


@pytest.mark.parametrize("policy", ["dplb", "areal"])
def test_the_file_is_of_the_documented_format(tmp_path: Path, policy: str) -> None:
    path, out = tmp_path / "j.jsonl", tmp_path / "t.json"
    recorded(path, policy, trace="lrm_math_open")
    assert main(["journal", "timeline", str(path), "--out", str(out)]) == 0
    whole = json.loads(out.read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: Events = whole["traceEvents"]
    for event in events:
        fields = FIELDS[event["ph"]]
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        for name, kinds in fields.items():
            assert isinstance(event[name], kinds), (name, event)
        assert event.get("ts", 0) >= 0
    assert {event["name"] for event in of(events, "M")} <= {"process_name", "thread_name"}
    assert all(event["s"] in ("g", "p", "t") for event in of(events, "i"))
    for event in of(events, "C"):
        assert all(isinstance(value, (int, float)) for value in event["args"].values())
    starts = {event["id"]: event for event in of(events, "s")}
    ends = {event["id"]: event for event in of(events, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of(events, "s"))
    slices = {(event["pid"], event["tid"], event["ts"]) for event in of(events, "X")}
    for number, end in ends.items():
        assert starts[number]["ts"] <= end["ts"]
        assert (end["pid"], end["tid"], end["ts"]) in slices, "an arrow ends where a slice begins"


def test_a_page(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(path, "areal")
    data = data_of(journal_page(Recording(path)))
    [policy] = data["policies"]
    assert (data["title"], policy["name"]) == ("j.jsonl", "areal")
    assert sum(policy["staleness"].values()) == 48
    assert len(policy["record"]["curves"]) == len(policy["steps"]) == run.summary.steps
    assert sum(policy["record"]["spans"]["tokens"]) == sum(s.generated_tokens for s in run.steps)
    assert data["offered"] == []
    assert ("batches", [str(run.summary.steps)]) in [
        (row["name"], row["cells"]) for row in data["tables"][0]["rows"]
    ]
