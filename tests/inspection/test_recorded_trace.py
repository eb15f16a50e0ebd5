"""The trace out of a journal is the trace that was replayed, whatever the policy did with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Answer
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.inspection.recording import Recording, TraceFold
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators.traces import Trace, TraceError
from tests.inspection.journals import recorded


def told(path: Path) -> Trace:
    fold = TraceFold(str(path))
    Recording(path).tell([Folded(fold).observe])
    return fold.trace("again")


@pytest.mark.parametrize("policy", ["dplb", "areal", "partial_rollout", "best_on_policy"])
def test_trajectories_come_back_turn_by_turn(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    offered, _ = recorded(path, policy)
    found = told(path)
    assert found.groups.keys() == offered.groups.keys()
    for group, samples in offered.groups.items():
        for was, now in zip(samples, found.groups[group], strict=True):
            assert now.prompt_tokens == max(sample.prompt_tokens for sample in samples)
            assert now.finish == was.finish
            assert len(now.turns) == len(was.turns)
            for before, after in zip(was.turns, now.turns, strict=True):
                assert after.output_tokens == before.output_tokens
                assert after.observation_tokens == before.observation_tokens
                assert after.tool_s == pytest.approx(before.tool_s)


def test_what_was_not_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    recorded(path, "dplb")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    assert 0 < len(told(path).groups) < 12
    path.write_text("".join(lines[:5]))
    with pytest.raises(TraceError):
        told(path)


def test_a_client_s_request_is_a_sample_of_the_group_it_named() -> None:
    fold = TraceFold("here")
    folded = Folded(fold)
    for number, group in enumerate(("a", "a", "")):
        request = f"r{number}"
        made = DeliveredSample(request, group, 0, 9, 4, (Segment(3, 4, "i"),), 0, "length")
        folded.observe(7.0 + number, ev.RequestSubmitted(request, group, 9, 4), ())
        folded.observe(9.0 + number, ev.Woke(), [Answer(made)])
    groups = fold.trace("clients").groups
    assert {name: len(members) for name, members in groups.items()} == {"a": 2, "r2": 1}
    [first, second] = groups["a"]
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)
    assert (first.version, first.finish, first.response_tokens) == (3, "length", 4)
