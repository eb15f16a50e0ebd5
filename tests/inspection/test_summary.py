"""A journal's figures are those of the run that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.summary import rows, summary
from rollout_sched.simulators.replay.faults import Lost
from rollout_sched.simulators.replay.scenario import TrafficModel
from tests.inspection.journals import recorded


@pytest.mark.parametrize("policy", ["dplb", "areal", "partial_rollout"])
def test_the_figures_of_the_replay(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(path, policy)
    found = summary(Recording(path))
    assert found["policy"] == policy
    assert found["samples_delivered"] == run.summary.samples_delivered
    assert found["discarded_tokens"] == run.summary.discarded_tokens
    assert found["staleness_max"] == run.summary.staleness_max
    assert found["idle_bubble_by_cause"]["barrier"] > 0
    assert len(found["per_step"]) == len(run.steps)
    assert found["total_s"] <= run.summary.total_s


def test_clients_and_outages(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(
        path,
        "dplb",
        traffic=TrafficModel(rate=0.2, for_s=60.0),
        faults=(Lost(at_s=9.0, instance=1),),
    )
    found = summary(Recording(path))
    assert run.direct is not None
    assert found["direct"]["answered"] == run.direct.answered > 0
    assert found["outages"]["instances_lost"] == 1


# -- The figures of a journal to read --


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    recorded(path, "areal")
    found = summary(Recording(path))
    shown = dict(rows(found))
    assert shown["samples delivered"] == "48"
    assert "  answered" not in shown, "nobody asked for a response by itself"
    found["direct"] = {**found["direct"], "submitted": 3, "answered": 2}
    assert dict(rows(found))["  answered"] == "2"
