"""From a journal to what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.inspection.recording import Recording
from rollout_sched.metrics.attempts import OUTCOMES
from rollout_sched.page.run_page import ALONE, RunFold
from tests.inspection.journals import recorded
from tests.page.runs import small


@pytest.mark.parametrize("policy", ["dplb", "partial_rollout"])
def test_a_run(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    trace, run = recorded(path, policy, trace="lrm_math_open")
    fold = RunFold()
    end_s = Recording(path).tell([fold.observe])
    record = fold.record(end_s, [])
    assert len(record.instances) == 6
    made = sum(step.generated_tokens for step in run.steps)
    assert record.spans["tokens"].sum() == made
    assert len(record.requests["group"]) == trace.sample_count
    assert set(record.groups) == set(trace.groups)
    assert sum(kind == "delivered" for _, kind, _ in record.marks) == run.summary.steps
    assert record.lengths[-1] == max(
        sample.response_tokens for group in trace.groups.values() for sample in group
    )
    assert all(0 <= share <= 1 for share in record.fleet["kv"])
    assert max(record.fleet["kv_most"]) > 0
    assert max(record.fleet["in_flight"]) > 1
    resumed = OUTCOMES.index("interrupted") in record.attempts["outcome"].tolist()
    assert resumed == (policy == "partial_rollout")


def test_what_is_known_of_an_attempt() -> None:
    record = small().record
    assert record.attempts["place"].tolist() == [1, 2]
    assert record.attempts["waited"].tolist() == [0.0, 4.0]
    assert record.spans["version"].tolist() == [3, 3, 4]
    assert record.spans["attempt"].tolist() == [1, 0, 0]
    assert ALONE not in record.requests["index"].tolist()
