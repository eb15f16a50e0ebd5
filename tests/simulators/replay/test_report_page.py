"""The report of a replay as a page."""

from __future__ import annotations

from typing import Any

from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.comparison import verdict
from rollout_sched.simulators.replay.report import report_page
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import make_policy, make_scenario, make_trace
from tests.page.test_run_page import data_of


def drawn(seeds: int = 1) -> tuple[Any, dict[str, Any]]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(6)}, name="tiny")
    scenario = make_scenario(prompts_per_step=2, instances=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario, seeds=seeds, records=True)
    report = reports.document(trace, scenario, runs, steps=0, seeds=seeds)
    report["verdict"] = verdict(report)
    page = report_page(report, runs, Workload(trace, scenario.job))
    return data_of(page), report


def test_it_holds_the_report_and_the_runs() -> None:
    data, report = drawn()
    assert [policy["name"] for policy in data["policies"]] == ["one", "two"]
    assert data["verdict"] == report["verdict"]
    for policy, figures in zip(data["policies"], report["policies"], strict=True):
        assert sum(policy["staleness"].values()) == 12
        assert len(policy["record"]["curves"]) == figures["steps"]["mean"]
        assert len(policy["record"]["requests"]["group"]) == 12
        assert policy["record"]["lengths"][-1] == 20
        assert policy["steps"][0]["t90_s"] == figures["per_step"][0][0]["t90_s"]
        for step, curve in zip(policy["steps"], policy["record"]["curves"], strict=True):
            assert curve[-1] >= step["t99_s"] >= step["t90_s"] >= curve[0]
    assert data["offered"][-1] == 20


def test_the_tables_are_those_of_the_terminal() -> None:
    data, _ = drawn()
    titles = [table["title"] for table in data["tables"]]
    assert titles[0] == "Speed"
    first = data["tables"][0]["rows"][0]
    assert (first["name"], first["cells"][0]) == ("one", "1.00x")


def test_of_several_seeds_it_says_which_is_drawn() -> None:
    data, _ = drawn(seeds=2)
    assert "charts show seed 0" in data["about"][-1]
