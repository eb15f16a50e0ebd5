"""Grids of replays: which policies and scenarios they hold, and what is wrong with others."""

from __future__ import annotations

import pytest

from rollout_sched.config import ConfigError
from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.replay.sweep import (
    Axis,
    World,
    axis,
    is_of_policies,
    policies,
    split,
    worlds,
)

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
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected table\.key=value"):
        axis(text)


def test_whose_an_axis_is() -> None:
    assert is_of_policies(Axis("freshness", "max_staleness", (1,)))
    assert is_of_policies(Axis("weights", "when", ("now",)))
    assert not is_of_policies(Axis("weights", "fixed_s", (1.0,)))
    for table, key, says in (
        ("freshness", "max_stalenes", "no such parameter"),
        ("freshnes", "max_staleness", "no such role or scenario table"),
    ):
        with pytest.raises(CallerError, match=says):
            is_of_policies(Axis(table, key, (1,)))


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


def test_a_value_that_cannot_be_names_its_place() -> None:
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
    def test_where_nothing_can_be_shared_out(self, scenario: str, gpus: int) -> None:
        (world,) = worlds(scenario, [])
        with pytest.raises(CallerError, match="needs GPUs of its own"):
            split(world, gpus)
