"""The attempts of a run in columns."""

from __future__ import annotations

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import InstanceJoined, RequestInterrupted, Woke
from rollout_sched.metrics.attempts import OUTCOMES
from rollout_sched.metrics.fold import Folded
from rollout_sched.page.run_page import ALONE, AttemptTables


def test_a_request_is_one_row_and_each_of_its_attempts_another() -> None:
    tables = AttemptTables()
    folded = Folded(*tables.folds)
    folded.observe(0.0, InstanceJoined("i", 4, 1000, 2), [])
    folded.observe(1.0, Woke(), [Dispatch("g/1", 1, "i", 10, 40, 2, group="g", index=1)])
    folded.observe(2.0, RequestInterrupted("g/1", 1, 8), [])
    again = Dispatch("g/1", 2, "i", 18, 32, 2, response_tokens=8, group="g", index=1)
    folded.observe(5.0, Woke(), [again, Dispatch("d", 3, "i", 10, 40, 2)])
    assert tables.in_flight == 2
    found = {
        name: {key: column.tolist() for key, column in table.items()}
        for name, table in tables.columns(9.0).items()
    }
    assert list(tables.groups) == ["g", "d"]
    assert found["requests"] == {"group": [0, 1], "index": [1, ALONE]}
    assert found["attempts"]["request"] == [0, 0, 1]
    assert found["attempts"]["before"] == [0, 8, 0]
    assert found["attempts"]["waited"] == [0.0, 3.0, 0.0]
    outcomes = [OUTCOMES[number] for number in found["attempts"]["outcome"]]
    assert outcomes == ["interrupted", "still running", "still running"]
    assert found["spans"]["length"] == [1.0, 4.0, 4.0]
