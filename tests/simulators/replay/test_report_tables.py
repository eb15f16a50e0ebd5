"""The report to read: every digit of every figure at any width, and what each figure means."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.faults import Lost
from rollout_sched.simulators.replay.report import ROUGH, TABLES, heading, tables
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.scenario import TrafficModel
from tests.helpers import make_policy, make_scenario, make_trace

NAMES = ("one", "a_policy_with_quite_a_long_name", "a_policy_with_quite_a_long_game")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(5)}, name="tiny")
    scenario = make_scenario(
        instances=2,
        prompts_per_step=2,
        traffic=TrafficModel(rate=0.2, for_s=60.0),
        faults=[Lost(at_s=9.0, instance=1)],
    )
    policies = [make_policy(name) for name in NAMES]
    return reports.document(trace, scenario, replay(trace, policies, scenario), steps=0, seeds=1)


def large(figures: Any) -> Any:
    """The same report with figures as wide as they come."""
    if isinstance(figures, dict):
        if figures.keys() == {"mean", "min", "max"}:
            return {"mean": 123456.7, "min": 100000.0, "max": 140000.0}
        if figures.keys() == {"value", "low", "high"}:
            return {"value": 12.345, "low": 11.234, "high": 13.456}
        return {key: large(value) for key, value in figures.items()}
    return figures


@pytest.mark.parametrize("width", [80, 100, 200])
def test_every_figure_is_whole(document: dict[str, Any], width: int) -> None:
    policies = [{**large(policy), "name": policy["name"]} for policy in document["policies"]]
    text = tables({**document, "policies": policies}, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for whole in ("12.35x 11.23-13.46", "123,457 s \u00b116%", "12345670.0 %", "123.5 k \u00b116%"):
        assert text.count(whole) >= len(NAMES), whole


@pytest.mark.parametrize("width", [80, 100, 200])
def test_policies_can_be_told_apart(document: dict[str, Any], width: int) -> None:
    rows = [line.split("  ")[0] for line in tables(document, width).splitlines()]
    assert len({row for row in rows if row.startswith(("one", "a_policy"))}) == len(NAMES)


def test_every_figure_is_explained_where_it_is_shown(document: dict[str, Any]) -> None:
    text = " ".join(tables(document, 80).split())
    for columns in (*TABLES.values(), *(columns for _, _, columns in ROUGH)):
        for column in columns:
            assert f"{column.label} = {' '.join(column.means.split())}" in text


def test_a_wide_terminal_has_each_table_in_one_piece(document: dict[str, Any]) -> None:
    lines = tables(document, 400).splitlines()
    assert sum(set(line) == {"-"} for line in lines) == len(TABLES) + len(ROUGH)


def test_the_heading_fits_too(document: dict[str, Any]) -> None:
    assert max(map(len, heading(document, 60).splitlines())) <= 60
