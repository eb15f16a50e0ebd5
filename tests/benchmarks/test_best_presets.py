"""The table of what our presets reach: which policy a row runs, and what is said of it."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.best_presets import COLUMNS, KNOWN, ROWS, Row, shown
from benchmarks.synthetic import synthetic
from rollout_sched.config import load_policy
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import load_scenario


def test_every_row_names_a_policy() -> None:
    assert {load_policy(row.policy).name for row in ROWS} == {row.policy for row in ROWS}


def test_known_samples_are_not_trained() -> None:
    for trace, (known, trained) in KNOWN.items():
        assert known + trained <= traces.read(trace).group_size
    assert {row.trace for row in ROWS if row.known} == set(KNOWN)


@pytest.mark.parametrize(("wanted", "says"), [(0.1, "met"), (99.0, "**missed**"), (None, "-")])
def test_a_row_is_met_missed_or_without_a_target(wanted: float | None, says: str) -> None:
    scenario = load_scenario("tiny-cpu-2")
    trace = synthetic(8, 2, median=50, cap=200, prompt_median=20)
    job = msgspec.structs.replace(scenario.job, prompts_per_step=2)
    scenario = msgspec.structs.replace(scenario, job=job)
    row = Row("best_on_policy", "t", "s", wanted)
    base, ours = (
        run_policy(load_policy(name), trace, scenario)
        for name in ("round_robin_sync", "best_on_policy")
    )
    cells = [cell.strip() for cell in shown(row, [base], [ours]).strip("|").split("|")]
    assert len(cells) == len(COLUMNS)
    assert cells[5].endswith(says)
    ratio = base.summary.total_s / ours.summary.total_s
    assert cells[4] == f"{ratio:.2f} ({ratio:.2f}-{ratio:.2f})"
