"""Grids of replays: which policies and scenarios they hold, and what is wrong with others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.config import ConfigError
from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.replay.sweep import (
    Axis,
    World,
    axis,
    document,
    is_of_policies,
    policies,
    split,
    sweep_page,
    table,
    worlds,
)
from tests.helpers import make_policy, make_scenario, make_trace
from tests.page.test_run_page import data_of

APART = "qwen7b-8xh100-disaggregated"


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("fleet.instances=4,8", Axis("fleet", "instances", (4, 8))),
        (
            "weights.when = now, between_batches",
            Axis("weights", "when", ("now", "between_batches")),
        ),
        ("trainer.fixed_s=0.5", Axis("trainer", "fixed_s", (0.5,))),
        ("job.redraws=true,false", Axis("job", "redraws", (True, False))),
        ("fleet.kv_tokens=1_000", Axis("fleet", "kv_tokens", (1000,))),
    ],
)
def test_an_axis_is_read(text: str, means: Axis) -> None:
    assert axis(text) == means


@pytest.mark.parametrize("text", ["fleet", "fleet.instances", "instances=4", "fleet.instances="])
def test_malformed_axes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected table\.key=value"):
        axis(text)


def test_an_axis_belongs_to_policy_or_scenario() -> None:
    assert is_of_policies(Axis("freshness", "max_staleness", (1,)))
    assert is_of_policies(Axis("weights", "when", ("now",)))
    assert not is_of_policies(Axis("weights", "fixed_s", (1.0,)))
    for role, key, says in (
        ("freshnes", "max_staleness", 'no such role or scenario table; did you mean "freshness"'),
        ("freshness", "max_stalenes", 'no such parameter; did you mean "max_staleness"'),
    ):
        with pytest.raises(CallerError, match=says):
            is_of_policies(Axis(role, key, (1,)))


def test_each_policy_has_the_axes_that_are_its_own() -> None:
    axes = [Axis("freshness", "max_staleness", (1, 4)), Axis("batching", "max_ahead", (1.5, 2.0))]
    found = policies(["best_async", "magistral", "one_step_off"], axes)
    assert [policy.name for policy in found] == [
        *(
            f"best_async freshness.max_staleness={s} batching.max_ahead={a}"
            for s in (1, 4)
            for a in (1.5, 2.0)
        ),
        *(
            f"magistral freshness.max_staleness={s} batching.max_ahead={a}"
            for s in (1, 4)
            for a in (1.5, 2.0)
        ),
        "one_step_off freshness.max_staleness=1",
        "one_step_off freshness.max_staleness=4",
    ]
    assert found[2].roles["freshness"][1]["max_staleness"] == 4
    assert found[2].roles["batching"][1]["max_ahead"] == 1.5


def test_an_invalid_value_is_reported_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"freshness\.max_staleness"):
        policies(["best_async"], [Axis("freshness", "max_staleness", ("many",))])
    with pytest.raises(ConfigError, match="fleet"):
        worlds(APART, [Axis("fleet", "instances", (0,))])


def test_an_axis_that_no_policy_here_has() -> None:
    with pytest.raises(CallerError, match=r"--set batching\.batches: none of the policies"):
        policies(["dplb"], [Axis("batching", "batches", (2, 3))])


def test_a_scenario_at_every_point() -> None:
    found = worlds(APART, [Axis("fleet", "instances", (4, 8)), Axis("job", "epochs", (1, 2))])
    assert [(w.scenario.fleet.instances, w.scenario.job.epochs) for w in found] == [
        (4, 1),
        (4, 2),
        (8, 1),
        (8, 2),
    ]
    assert found[1].said == "fleet.instances=4 job.epochs=2"
    assert worlds(APART, []) == [World(load_scenario(APART), "")]


class TestSplit:
    def test_the_trainer_s_speed_goes_with_its_gpus(self) -> None:
        (world,) = worlds(APART, [])
        given = world.scenario.trainer.seconds_per_token  # with two GPUs
        found = split(world, 8)
        assert [w.scenario.fleet.instances for w in found] == list(range(1, 8))
        times = [w.scenario.trainer.seconds_per_token for w in found]
        assert times == pytest.approx([given * 2 / gpus for gpus in range(7, 0, -1)])
        assert (found[0].said, found[0].split) == ("1 + 7 GPUs", 8)

    @pytest.mark.parametrize(("scenario", "gpus"), [(APART, 6), ("qwen7b-8xh100", 16)])
    def test_a_fleet_that_cannot_be_split_is_refused(self, scenario: str, gpus: int) -> None:
        (world,) = worlds(scenario, [])
        with pytest.raises(CallerError, match="needs GPUs of its own"):
            split(world, gpus)


def sweep() -> dict[str, Any]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(6)}, name="tiny")
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    found, where = [], []
    for instances in (1, 2):
        scenario = make_scenario(prompts_per_step=2, instances=instances)
        runs = replay(trace, policies, scenario)
        found.append(reports.document(trace, scenario, runs, steps=0, seeds=1))
        where.append(World(scenario, f"fleet.instances={instances}"))
    return document(found, where)


def test_every_world_has_its_report() -> None:
    found = sweep()
    assert found["schema"] == "rollout-sched-sweep/1"
    assert [world["changed"] for world in found["worlds"]] == [
        "fleet.instances=1",
        "fleet.instances=2",
    ]
    assert [len(world["policies"]) for world in found["worlds"]] == [2, 2]
    assert msgspec.json.decode(msgspec.json.encode(found))


def test_the_frontier_has_the_unbeaten_points() -> None:
    found = sweep()
    places = [(one["world"], one["policy"]) for one in found["frontier"]]
    rows = {
        (world["changed"], policy["name"]): policy["equal_length_tokens_per_s"]["mean"]
        for world in found["worlds"]
        for policy in world["policies"]
    }
    fastest = max(rows.values())
    assert rows[places[0]] >= 0.99 * fastest
    few = {place: speed for place, speed in rows.items() if place[0] == "fleet.instances=1"}
    assert any(place in few for place in places)  # with fewer GPUs nobody is faster


def test_a_row_for_each_that_fits_the_line() -> None:
    found = sweep()
    for width in (80, 100, 200):
        text = table(found, width)
        assert max(map(len, text.splitlines())) <= width
        for name in ("one | fleet.instances=1", "two | fleet.instances=2"):
            assert text.count(name) == 1
        rows = [
            line for line in text.splitlines() if line.startswith("* ") and "Pareto" not in line
        ]
        assert len(rows) == len(found["frontier"])


def test_every_replay_is_a_row_and_a_point() -> None:
    found = sweep()
    answer = data_of(sweep_page(found))["answer"]
    points = answer["points"]
    assert [row["name"] for row in answer["rows"]] == [point["name"] for point in points]
    assert len(points) == 4
    assert sum(point["frontier"] for point in points) == len(found["frontier"]) > 0
    for label in answer["axes"]:
        assert len({point[label] for point in points}) > 1, "else it says nothing"
    assert "GPUs" in answer["axes"]
    for point in points:
        assert point["instances in the fleet"] == point["GPUs"] == int(point["name"][-1])
        assert point["speed"] > 0
        assert point["low"] is None
