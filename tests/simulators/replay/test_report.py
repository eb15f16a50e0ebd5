"""The report as data, and what is said of it in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.simulators.instance.model import Speculation
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.comparison import verdict
from rollout_sched.simulators.replay.faults import Lost
from rollout_sched.simulators.replay.report import report_page
from rollout_sched.simulators.replay.runs import replay, replay_resampled
from rollout_sched.simulators.replay.scenario import TrafficModel
from rollout_sched.simulators.replay.tables import (
    SERVING,
    TRAINING,
    Column,
    answer,
    at,
    bounds,
    grid,
    heading,
    tables,
)
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import make_policy, make_scenario, make_trace
from tests.page.test_run_page import data_of

#: What a reader of the JSON relies on; every one an object {mean, min, max}.
FIGURES = (
    "total_s",
    "rollout_s",
    "t90_s",
    "accepted_tokens_per_s",
    "idle_bubble",
    "occupancy_bubble",
    "discarded_tokens",
    "reprefilled_tokens",
    "preemptions",
    "trainer_wait_s",
    "staleness.max",
    "staleness.mean",
    "length_bias.mean_ratio",
    "length_bias.ks",
    "gap_to_bound",
    "samples_delivered",
    "samples_lost",
)


def test_drafts_are_reported_only_where_there_are_any(document: dict[str, Any]) -> None:
    """Of one draft a step, the accepted share is the acceptance."""
    title = "drafted = tokens"
    assert title not in tables(document, 200)
    trace = make_trace({"g": [500, 400]}, name="tiny")
    drafts = Speculation(1, 0.6, schedule="always")
    scenario = make_scenario(prompts_per_step=1, speculation=drafts)
    runs = replay(trace, [make_policy("one")], scenario)
    drafted = reports.document(trace, scenario, runs, steps=0, seeds=1)
    assert title in tables(drafted, 200)
    (policy,) = drafted["policies"]
    assert policy["draft_acceptance"]["mean"] == pytest.approx(0.6, abs=0.01)
    assert policy["drafted_tokens"]["mean"] == pytest.approx(900 / 1.6, rel=0.02)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(5)}, name="tiny")
    scenario = make_scenario(prompts_per_step=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario, seeds=2)
    return reports.document(trace, scenario, runs, steps=0, seeds=2)


def test_a_report_names_trace_and_scenario(document: dict[str, Any]) -> None:
    assert document["schema"] == "rollout-sched-replay/1"
    assert (document["trace"], document["scenario"]) == ("tiny", "tiny")
    assert (document["prompts"], document["prompts_per_step"]) == (5, 2)
    assert (document["samples_per_prompt"], document["max_tokens"], document["seeds"]) == (2, 17, 2)
    assert [policy["name"] for policy in document["policies"]] == ["one", "two"]


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_a_spread(document: dict[str, Any], figure: str) -> None:
    for policy in document["policies"]:
        spread = at(policy, figure)
        assert set(spread) == {"mean", "min", "max"}
        assert spread["min"] <= spread["mean"] <= spread["max"]


def test_the_bound_holds_for_every_policy(document: dict[str, Any]) -> None:
    bound = document["lower_bound"]["total_s"]
    assert 0 < bound["min"] <= bound["mean"] <= bound["max"]
    for policy in document["policies"]:
        assert policy["total_s"]["min"] >= bound["min"] - 1e-6


def test_steps_are_kept_run_by_run(document: dict[str, Any]) -> None:
    for policy in document["policies"]:
        assert [len(steps) for steps in policy["per_step"]] == [3, 3]
        assert sum(step["samples"] for step in policy["per_step"][0]) == 10


class TestWarnings:
    def heading(self, epochs: int, samples: int) -> str:
        trace = make_trace({f"g{i}": [5 + i, 6, 7, 8] for i in range(4)})
        scenario = make_scenario(prompts_per_step=2, epochs=epochs, samples=samples)
        runs = replay(trace, [make_policy("one")], scenario)
        return heading(reports.document(trace, scenario, runs, steps=0, seeds=1), 2000)

    def test_missing_samples_of_an_epoch_cause_no_warning(self) -> None:
        """They are drawn, so that no history has seen them."""
        text = self.heading(2, 3)
        assert "4 prompts x 2 epochs x 3 samples" in text
        assert "WARNING" not in text

    def short(self, groups: int, staleness: int, *, prompt: int = 4) -> list[str]:
        trace = make_trace({f"g{i}": [5 + i] for i in range(groups)}, prompt=prompt)
        policy = make_policy("late", batching="fully_async", freshness={"max_staleness": staleness})
        scenario = make_scenario()
        runs = replay(trace, [make_policy("one"), policy], scenario)
        warnings: list[str] = reports.document(trace, scenario, runs, steps=0, seeds=1)["warnings"]
        return warnings

    def test_too_few_steps_for_the_staleness_are_warned_of(self) -> None:
        [warning] = self.short(11, 2)
        assert warning.startswith("11 steps are too few")
        assert "(late 12)" in warning
        assert "--epochs" in warning
        assert self.short(12, 2) == []

    def test_a_trace_without_lengths_of_prompts_is_warned_of(self) -> None:
        [warning] = self.short(12, 2, prompt=1)
        assert "--columns prompt=" in warning

    def test_a_sorted_trace_is_warned_of_unless_shuffled(self) -> None:
        trace = make_trace({f"g{i}": [5 + 3 * i] for i in range(40)})
        scenario = make_scenario(prompts_per_step=8)

        def warnings(seeds: int) -> list[str]:
            runs = replay(trace, [make_policy("one")], scenario, seeds=seeds)
            report = reports.document(trace, scenario, runs, steps=0, seeds=seeds)
            return [warning for warning in report["warnings"] if "random order" in warning]

        [warning] = warnings(1)
        assert "Take --seeds 3" in warning
        assert warnings(2) == []

    def test_too_few_steps_for_any_policy_are_warned_of(self) -> None:
        [warning] = self.short(3, 0)
        assert "(one 4, late 4)" in warning


class TestComparison:
    def test_ratios_are_to_the_first_policy(self, document: dict[str, Any]) -> None:
        one, two = (policy["comparison"] for policy in document["policies"])
        assert one["speed_up"] == {"value": 1.0, "low": None, "high": None}
        assert two["time"]["value"] > 0
        assert "The first policy is one" in answer(document, 200)
        assert "No confidence intervals: add --resamples" in answer(document, 200)

    def test_the_parts_of_a_run_are_the_run(self, document: dict[str, Any]) -> None:
        for policy in document["policies"]:
            parts = sum(policy[part]["mean"] for part in ("first_step_s", "steady_s", "drain_s"))
            assert parts == pytest.approx(policy["total_s"]["mean"])

    def test_the_bound_at_staleness_0_is_beside_the_other(self, document: dict[str, Any]) -> None:
        bound = document["lower_bound"]
        assert bound["total_s"]["mean"] <= bound["on_policy"]["parts_s"]["mean"]
        assert (
            bound["on_policy"]["parts_s"]["mean"] <= (bound["on_policy"]["whole_batches_s"]["mean"])
        )
        text = bounds(document, 2000)
        assert "; at staleness 0 in less than" in text
        for policy in document["policies"]:
            assert policy["max_staleness"] == 0
            assert policy["gap_to_on_policy_bound"]["min"] >= -1e-9

    def test_intervals_are_shown_where_prompts_were_resampled(self) -> None:
        trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(8)})
        policies, scenario = [make_policy("one"), make_policy("two")], make_scenario()
        runs = replay(trace, policies, scenario)
        drawn = replay_resampled(trace, policies, scenario, resamples=2)
        document = reports.document(trace, scenario, runs, steps=0, seeds=1, resamples=drawn)
        assert document["resamples"] == 2
        assert "Intervals are from 2 resamples" in answer(document, 200)


class TestWriting:
    def test_a_written_report_can_be_read(self, document: dict[str, Any]) -> None:
        assert json.loads(reports.as_json(document)) == json.loads(json.dumps(document))


def test_tables_name_every_policy(document: dict[str, Any]) -> None:
    text = heading(document, 120) + tables(document, 120)
    assert "5 prompts x 2 samples" in text
    assert text.count("one") >= 2
    assert text.count("two") >= 2


class TestRoughWorlds:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(5)}, name="tiny")

    def document(self, **world: Any) -> dict[str, Any]:
        scenario = make_scenario(traffic=TrafficModel(rate=0.2, for_s=60.0), **world)
        runs = replay(self.trace, [make_policy("one")], scenario)
        return reports.document(self.trace, scenario, runs, steps=0, seeds=1)

    def text(self, document: dict[str, Any]) -> str:
        return heading(document, 120) + tables(document, 120)

    def test_clients_and_outages_have_tables_of_their_own(self) -> None:
        document = self.document(instances=2, faults=[Lost(at_s=9.0, instance=1)])
        assert document["policies"][0]["outages"]["instances_lost"]["mean"] == 1
        asked = document["policies"][0]["direct"]["submitted"]["mean"]
        assert asked == document["conversations"]
        text = self.text(document)
        assert "What the clients got" in text
        assert "What went wrong" in text
        assert f"{asked:.0f} conversations of clients" in text
        assert "5 prompts x 2 samples" in text

    def test_tables_without_clients_or_outages_are_omitted(self, document: dict[str, Any]) -> None:
        assert "conversations" not in document
        assert not {"direct", "outages"} & document["policies"][0].keys()
        assert "What the clients got" not in self.text(document)

    def test_training_is_omitted_without_a_trainer(self) -> None:
        text = self.text(self.document(batches=False))
        assert "no training" in text
        assert "What the clients got" in text
        assert "What the trainer got" not in text
        assert bounds(self.document(batches=False), 120) == ""


NAMES = ("one", "a_policy_with_quite_a_long_name", "a_policy_with_quite_a_long_game")


@pytest.fixture(scope="module")
def document_report_tables() -> dict[str, Any]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(5)}, name="tiny")
    scenario = make_scenario(
        instances=2,
        prompts_per_step=2,
        traffic=TrafficModel(rate=0.2, for_s=60.0),
        faults=[Lost(at_s=9.0, instance=1)],
        poll_s=1.0,
        speculation=Speculation(2, 0.5, schedule="always"),
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


def test_a_name_makes_room_for_the_figures_of_one_table() -> None:
    columns = [Column(f"figure{number}", "value", str, "it") for number in range(6)]
    names, rows = ["short", "of eighteen letter"], [{"value": "0.5"}, {"value": "0.7"}]
    lines = grid(columns, names, rows, 6 * len("  figure0") + len("policy"))
    assert [line.split()[0] for line in lines if line] == ["policy", "-" * 60, "short", "of", "0.7"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_figure_is_truncated(document_report_tables: dict[str, Any], width: int) -> None:
    policies = [
        {**large(policy), "name": policy["name"]} for policy in document_report_tables["policies"]
    ]
    text = tables({**document_report_tables, "policies": policies}, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for whole in ("12.35x 11.23-13.46", "123,457 s \u00b116%", "12345670.0 %", "123.5 k \u00b116%"):
        assert text.count(whole) >= len(NAMES), whole


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("shown", [answer, tables])
def test_no_name_is_cut(document_report_tables: dict[str, Any], width: int, shown: Any) -> None:
    text = shown(document_report_tables, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in NAMES)


def test_every_figure_is_explained_where_it_is_shown(
    document_report_tables: dict[str, Any],
) -> None:
    """A figure that is 0 for all policies is not shown."""
    text = " ".join(tables(document_report_tables, 80).split())
    for columns in (TRAINING | SERVING).values():
        for column in columns:
            figures = [at(one, column.path) for one in document_report_tables["policies"]]
            zero = not any(one.get("max", 1) if isinstance(one, dict) else one for one in figures)
            said = f"{column.label} = {' '.join(column.means.split())}"
            assert (said in text) != zero, column.label


def test_the_answer_compares_at_equal_staleness_first() -> None:
    """And leaves out what is 0 for all: here the staleness, if every policy is on-policy."""
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(9)}, name="tiny")
    scenario = make_scenario(prompts_per_step=2, instances=2)

    def policy(name: str, staleness: int) -> Any:
        return make_policy(name, batching="fully_async", freshness={"max_staleness": staleness})

    def shown(*policies: Any) -> list[str]:
        runs = replay(trace, policies, scenario)
        text = answer(reports.document(trace, scenario, runs, steps=0, seeds=1), 100)
        rows = text.split("---\n")[1].split("\n\n")[0].splitlines()
        assert ("stale mean" in " ".join(text.split())) == any(
            one.name != "one" for one in policies
        )
        return [row.lstrip("* ").split()[0] for row in rows]

    assert shown(policy("old", 2), make_policy("one"), policy("older", 2))[0] == "one"
    assert shown(make_policy("one")) == ["one"]


def test_the_heading_fits_too(document_report_tables: dict[str, Any]) -> None:
    assert max(map(len, heading(document_report_tables, 60).splitlines())) <= 60


def drawn(seeds: int = 1) -> tuple[Any, dict[str, Any]]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(6)}, name="tiny")
    scenario = make_scenario(prompts_per_step=2, instances=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario, seeds=seeds, records=True)
    report = reports.document(trace, scenario, runs, steps=0, seeds=seeds)
    report |= {"verdict": verdict(report), "serve": None}
    page = report_page(report, runs, Workload(trace, scenario.job))
    return data_of(page), report


def test_a_page_has_the_report_and_its_runs() -> None:
    data, report = drawn()
    assert [policy["name"] for policy in data["policies"]] == ["one", "two"]
    assert data["verdict"] == report["verdict"]
    assert {row["name"] for row in data["answer"]["rows"]} == {"one", "two"}
    assert [point["said"][0] for point in data["answer"]["points"]] == [
        row["name"] for row in data["answer"]["rows"]
    ]
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


def test_a_page_names_the_drawn_seed() -> None:
    data, _ = drawn(seeds=2)
    assert "charts show seed 0" in data["about"][-1]
