"""Candidates: always inside the space, always buildable, and told apart by what they say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched import config
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.candidates import (
    BASELINES,
    Candidate,
    cross,
    draw,
    neighbour,
    presets,
    starts,
)
from rollout_sched.simulators.tune.space import Setting
from tests.simulators.tune.bench import candidate, setting

SETTINGS = st.builds(
    setting,
    max_staleness=st.sampled_from([0, 1, 4]),
    multi_turn=st.booleans(),
    disaggregated=st.booleans(),
    instances=st.sampled_from([1, 8]),
    samples_per_prompt=st.sampled_from([1, 8]),
    remembers=st.booleans(),
)
DICE = st.integers(0, 10_000).map(random.Random)


def assert_inside(one: Candidate, here: Setting) -> None:
    one.policy().build()
    chosen: dict[str, dict[str, str]] = {}
    for role in space.SPACE:
        row = one.table[role]
        fitting = {option.use: option for option in space.options(role, here, chosen)}
        assert row["use"] in fitting
        keys = fitting[row["use"]].keys(here)
        assert set(row) == {"use", *keys}
        chosen[role] = {"use": row["use"]}
    freshness = one.table["freshness"]
    assert freshness.get("max_staleness", 0) <= here.max_staleness


@settings(max_examples=50, deadline=None)
@given(SETTINGS, DICE)
def test_draws_are_inside_the_space_and_buildable(here: Setting, rng: random.Random) -> None:
    one = draw(here, rng)
    assert_inside(one, here)
    chosen: dict[str, dict[str, str]] = {}
    for role, row in one.table.items():
        (option,) = [o for o in space.options(role, here, chosen) if o.use == row["use"]]
        assert all(row[key] in values for key, values in option.keys(here).items())
        chosen[role] = {"use": row["use"]}


@settings(max_examples=40, deadline=None)
@given(SETTINGS, DICE)
def test_neighbours_and_crossings_are_inside_too(here: Setting, rng: random.Random) -> None:
    parents = [*rng.sample(presets(here), 3), draw(here, rng)]
    for parent in parents:
        assert_inside(neighbour(parent, here, rng), here)
    assert_inside(cross(parents[0], parents[-1], here, rng), here)


def test_a_neighbour_differs_and_is_near() -> None:
    here, rng = setting(max_staleness=0), random.Random(1)
    parent = draw(here, rng)
    near = [neighbour(parent, here, rng) for _ in range(30)]
    assert sum(one.key != parent.key for one in near) > 10
    changed = [sum(one.table[role] != parent.table[role] for role in space.SPACE) for one in near]
    assert max(changed) <= 4  # what does not fit a change is drawn anew


def test_a_crossing_has_every_role_from_one_of_the_two() -> None:
    here, rng = setting(max_staleness=0), random.Random(2)
    one = candidate(batching="sync", over_prompts=1.5, ordering="fifo", admission="unbounded")
    other = candidate(batching="tail_batching", ordering="fifo", admission="slots")
    children = [cross(one, other, here, rng) for _ in range(20)]
    pairs = {
        (child.table["batching"]["use"], child.table["admission"]["use"]) for child in children
    }
    assert pairs == {
        (batching, admission)
        for batching in ("sync", "tail_batching")
        for admission in ("unbounded", "slots")
    }


def test_the_same_dice_draw_the_same() -> None:
    one, other = (draw(setting(), random.Random(5)) for _ in range(2))
    assert one.key == other.key
    assert one.key != draw(setting(), random.Random(6)).key


@settings(max_examples=20, deadline=None)
@given(SETTINGS)
def test_starts_are_inside_the_space(here: Setting) -> None:
    for one in starts(here, random.Random(0)):
        assert_inside(one, here)


def test_starts_without_use_in_a_setting_are_left_out() -> None:
    def uses(here: Setting) -> set[str]:
        found = starts(here, random.Random(0))
        return {row["use"] for one in found for row in one.table.values()}

    assert "tail_batching" in uses(setting(max_staleness=0))
    assert "fully_async" not in uses(setting(max_staleness=0))
    assert "fully_async" in uses(setting(max_staleness=1))
    assert "like_lengths" in uses(setting(remembers=True)) - uses(setting(remembers=False))
    assert "session_cap" in uses(setting(multi_turn=True)) - uses(setting(multi_turn=False))


class TestPresets:
    def test_the_baselines_come_first_and_always(self) -> None:
        for most in (0, 1, 8):
            names = [one.preset for one in presets(setting(max_staleness=most))]
            shipped = [name for name in BASELINES if name in config.shipped("policies/presets")]
            assert names[: len(shipped)] == shipped
            assert "round_robin_sync" in shipped

    def test_stale_presets_need_staleness(self) -> None:
        names = {one.preset for one in presets(setting(max_staleness=0))}
        assert "one_step_off" not in names
        assert "one_step_off" in {one.preset for one in presets(setting(max_staleness=1))}

    def test_what_has_no_effect_keeps_no_preset_out(self) -> None:
        """Without turns, session affinity did, and history that no prompt has."""
        here = setting(max_staleness=0, multi_turn=False, remembers=False, disaggregated=False)
        names = {one.preset for one in presets(here)}
        assert names >= {"best_on_policy", "tail_batching", "stage_fusion", "seer", "like_lengths"}

    @pytest.mark.parametrize("most", [0, 1])
    def test_what_may_exceed_the_bound_is_left_out(self, most: int) -> None:
        for one in presets(setting(max_staleness=most)):
            freshness = one.policy().build().freshness
            assert getattr(freshness, "max_staleness", None) in range(most + 1), one.preset

    @pytest.mark.parametrize("most", [1, 2, 8])
    def test_a_wider_bound_is_narrowed(self, most: int) -> None:
        found = {one.preset: one for one in presets(setting(max_staleness=most))}
        assert found["partial_rollout"].table["freshness"]["max_staleness"] == min(4, most)

    def test_presets_are_those_shipped(self) -> None:
        for one in presets(setting(max_staleness=8)):
            shipped = config.load_policy(one.preset)
            assert one.policy().build() == shipped.build()


class TestWords:
    def test_a_name_says_what_departs_from_the_defaults(self) -> None:
        assert candidate(batching="sync", over_prompts=1.0).name == "the defaults"
        assert candidate(batching="sync", over_prompts=1.25).name == "sync over_prompts=1.25"
        both = candidate(routing="round_robin", admission="slots", factor=0.5)
        assert both.name == "round_robin, slots factor=0.5"

    def test_departures_are_counted(self) -> None:
        assert candidate(batching="sync", over_prompts=1.0).departures == 0
        assert candidate(routing="round_robin", admission="slots", factor=0.5).departures == 2
        by_name = {one.preset: one for one in presets(setting(max_staleness=8))}
        assert by_name["round_robin_sync"].departures == 0
        assert by_name["tail_batching"].departures >= 2

    def test_the_key_does_not_depend_on_the_order_of_keys(self) -> None:
        one = Candidate({"a": {"use": "x", "k": 1}, "b": {"use": "y"}})
        other = Candidate({"b": {"use": "y"}, "a": {"k": 1, "use": "x"}})
        assert one.key == other.key
