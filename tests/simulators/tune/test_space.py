"""The search space: it knows every policy and parameter there is, or says why not."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched import config
from rollout_sched.simulators.tune.space import (
    ALWAYS,
    SPACE,
    STALENESS,
    STARTS,
    WEIGHTS,
    MultiplesOfSetting,
    Option,
    Parameter,
    RangeToSetting,
    Table,
    options,
)
from tests.simulators.tune.bench import setting

#: What is not searched, "role.policy" or "role.policy.parameter", and the reason.
LEFT_OUT: dict[str, str] = {
    "interruption.partial.unresumable": "every response of a trace can be resumed",
    "affinity.by_cost": "trained requests have no sessions, only clients' direct requests have",
    "affinity.none": "for the same reason",
    "admission.aimd_concurrency.most": "a safety limit that no trace reaches",
    "interruption.none.at_update": "it has only one value",
    "routing.power_of_two": "least_requests sees the whole fleet at the same cost",
    "routing.random": "round_robin spreads similar requests at least as evenly as chance",
    "routing.static_split": "it is a baseline",
    "routing.vllm_internal_lb": "what engines do by themselves; least_requests has newer counts",
    "batching.fully_async.window_fraction": "costs speed for an order that tune does not limit",
    "weights.all_at_once.reopen": "alone gives the first instance all waiting requests",
    "prediction.oracle": "only a replay knows true lengths",
    "freshness.paced": "bounds the aggregate, so a sample may exceed the user's bound",
    "freshness.unbounded": "does not keep the user's bound",
}

EVERY_OPTION = [(role, option) for role, of_role in SPACE.items() for option in of_role]


def in_config() -> set[str]:
    """ "role.policy" and "role.policy.parameter" of all that a policy file can say."""
    found = set()
    for role, policies in config.REGISTRY.items():
        for use, policy in policies.items():
            found.add(f"{role}.{use}")
            fields = [field.name for field in msgspec.structs.fields(policy)]
            found |= {f"{role}.{use}.{key}" for key in fields if key not in config.SUPPLIED}
    return found


def in_space() -> set[str]:
    found = set()
    for role, option in EVERY_OPTION:
        found.add(f"{role}.{option.use}")
        found |= {f"{role}.{option.use}.{key}" for key in option.parameters}
    return found


def test_everything_a_policy_file_can_say_is_searched_or_left_out_for_a_reason() -> None:
    left_out = set(LEFT_OUT)
    excused = {
        name
        for name in in_config()
        if any(name == out or name.startswith(f"{out}.") for out in LEFT_OUT)
    }
    assert in_config() - in_space() - excused == set()
    assert in_space() - in_config() == set()
    assert left_out - in_config() == set()
    assert left_out & in_space() == set()
    assert all(LEFT_OUT.values())


def test_weights_name_roles() -> None:
    assert set(WEIGHTS) <= set(SPACE)
    assert min(WEIGHTS.values()) > 0


@pytest.mark.parametrize("table", STARTS)
def test_starts_are_policies(table: Table) -> None:
    config.parse_policy("start", table).build()


def test_the_first_option_of_a_role_is_the_default_or_the_only_one() -> None:
    for role, of_role in SPACE.items():
        assert of_role[0].use == config.DEFAULTS[role]


@pytest.mark.parametrize(
    ("role", "option"), EVERY_OPTION, ids=lambda value: getattr(value, "use", value)
)
def test_needs_and_bars_name_roles_that_were_chosen_before(role: str, option: Option) -> None:
    before = list(SPACE)[: list(SPACE).index(role)]
    for other, use in (*option.needs, *option.bars):
        assert other in before
        assert use in config.REGISTRY[other]


@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize(
    ("role", "option"), EVERY_OPTION, ids=lambda value: getattr(value, "use", value)
)
def test_every_value_is_one_the_policy_takes(role: str, option: Option, most: int) -> None:
    here = setting(max_staleness=most, multi_turn=True, remembers=True)
    for key, values in option.keys(here).items():
        assert len(values) == len(set(values)) > 0
        for value in values:
            row = {"use": option.use, key: value}
            config.parse_policy("p", {role: row})  # each alone; some do not go together


def test_without_staleness_nothing_that_makes_samples_stale_may_be_chosen() -> None:
    fresh = setting(max_staleness=0)
    assert [one.use for one in options("interruption", fresh, {})] == ["none"]
    assert {one.use for one in options("batching", fresh, {})} == {
        "sync",
        "tail_batching",
        "pooled",
    }
    assert options("freshness", fresh, {})[0].keys(fresh) == {}


def test_length_based_options_get_a_prediction() -> None:
    chosen = {"ordering": {"use": "longest_first"}}
    assert [one.use for one in options("prediction", setting(), chosen)] == ["group_history"]
    assert [one.use for one in options("prediction", setting(), {})] == ["none"]


def test_history_is_for_prompts_that_come_again() -> None:
    def uses(remembers: bool) -> set[str]:
        here = setting(remembers=remembers)
        chosen = {"ordering": {"use": "longest_first"}}
        roles = ("selection", "prediction")
        return {one.use for role in roles for one in options(role, here, chosen)}

    assert uses(True) - uses(False) == {"like_lengths", "prompt_history"}


def test_affinity_needs_multi_turn_samples() -> None:
    here = setting(max_staleness=0, multi_turn=False)
    assert "session_affinity" not in {one.use for one in options("routing", here, {})}
    here = setting(max_staleness=0, multi_turn=True)
    assert "session_affinity" in {one.use for one in options("routing", here, {})}


def test_values_that_depend_on_the_setting() -> None:
    assert MultiplesOfSetting("prompts_per_step", (0, 1, 1.5, 1.51)).values(
        setting(prompts_per_step=8)
    ) == [
        0,
        8,
        12,
    ]
    assert RangeToSetting("max_staleness").values(setting(max_staleness=1)) == [1]
    assert RangeToSetting("max_staleness").values(setting(max_staleness=2)) == [1, 2]
    assert RangeToSetting("max_staleness").values(setting(max_staleness=9)) == [1, 2, 3, 4, 8, 9]
    assert Parameter((3, 1)).values(setting()) == [3, 1]


def test_a_parameter_may_have_a_condition_of_its_own() -> None:
    option = Option("p", {"a": Parameter((1,)), "b": Parameter((2,), STALENESS)})
    assert option.when is ALWAYS
    assert option.keys(setting(max_staleness=0)) == {"a": [1]}
    assert option.keys(setting(max_staleness=1)) == {"a": [1], "b": [2]}
