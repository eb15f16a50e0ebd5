"""Trained against offered lengths."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Deliver
from rollout_sched.metrics.length_bias import LengthFold, order_excess
from tests.metrics.tape import Tape, deliver, sample

OFFERED = {"a": [10, 20], "b": [30, 40]}


class TestLengthBias:
    def bias(self, *batches: dict[str, list[int]]) -> Any:
        tape = Tape("i", offered=OFFERED.__getitem__)
        for version, groups in enumerate(batches):
            samples = [
                sample(f"{group}/{i}", length)
                for group, lengths in groups.items()
                for i, length in enumerate(lengths)
            ]
            tape.at(version, ev.BatchRequested(), deliver(*samples, version=version))
        return tape.metrics.summary(10.0).length_bias

    def test_short_first_shows_in_the_steps_alone(self) -> None:
        bias = self.bias({"a": [10, 20]}, {"b": [30, 40]})
        assert (bias.mean_ratio, bias.ks, bias.group_ratio) == (1, 0, 1)
        assert bias.step_ks == 0.5

    def test_nothing_offered_is_no_bias(self) -> None:
        bias = Tape().metrics.summary(1.0).length_bias
        assert (bias.mean_ratio, bias.ks, bias.step_ks, bias.group_ratio) == (1, 0, 0, 1)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @settings(max_examples=50, deadline=None)
    @given(
        offered=st.lists(st.integers(1, 30), min_size=1, max_size=20),
        trained=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    )
    def test_ks_is_scipy_s(self, offered: list[int], trained: list[int]) -> None:
        stats = pytest.importorskip("scipy.stats")
        tape = Tape("i", offered=lambda group: offered)
        batch = deliver(*(sample(f"a/{i}", length) for i, length in enumerate(trained)))
        tape.at(0, ev.BatchRequested(), batch)
        expected = stats.ks_2samp(trained, offered, method="asymp").statistic
        assert tape.metrics.summary(1.0).length_bias.ks == pytest.approx(expected)


def fold(offered: dict[str, list[int]], *batches: dict[str, list[int]]) -> LengthFold:
    """Submitted in the order of `offered`, delivered as the batches say."""
    lengths = LengthFold(offered.__getitem__)
    handlers = lengths.handlers()
    for group, of in offered.items():
        handlers[ev.GroupSubmitted](0.0, ev.GroupSubmitted(group, len(of), 10, 100))
    for number, batch in enumerate(batches):
        samples = [sample(f"{group}/0", length) for group, of in batch.items() for length in of]
        handlers[Deliver](0.0, deliver(*samples, version=number))
    return lengths


class TestLongestTenth:
    """Of 20 the longest two, which are as long as a third."""

    offered: ClassVar = {"a": [*range(1, 18), 40, 40, 40]}

    @pytest.mark.parametrize(
        ("longest", "kept"),
        [((40, 40, 40), 1), ((30, 41, 40), 2 / 3), ((1, 1, 1), 0), ((40, 40, 40, 40), 4 / 3)],
    )
    def test_counts_groups_of_each_length(self, longest: tuple[int, ...], kept: float) -> None:
        bias = fold(self.offered, {"a": [*range(1, 18), *longest]}).bias()
        assert bias.longest_tenth_kept == pytest.approx(kept)


class TestSteady:
    offered: ClassVar = {"a": [10], "b": [90], "c": [20], "d": [80], "e": [30], "f": [70]}

    def test_deferred_long_answers_show(self) -> None:
        batches = ({"a": [10], "c": [20]}, {"e": [30], "f": [70]}, {"b": [90], "d": [80]})
        bias = fold(self.offered, *batches).bias(range(1, 2))
        assert bias.mean_ratio == 1
        assert bias.steady_mean_ratio == (30 + 70) / (20 + 80)  # against c and d

    def test_training_in_submission_order_has_no_bias(self) -> None:
        batches = [{group: of} for group, of in self.offered.items()]
        assert fold(self.offered, *batches).bias(range(1, 4)).steady_mean_ratio == 1

    def test_no_steady_ratio_without_steady_steps(self) -> None:
        assert fold(self.offered, {"a": [10]}).bias(range(1, 1)).steady_mean_ratio is None


class TestFloor:
    def offered(self, groups: int = 40) -> dict[str, list[int]]:
        return {f"g{n}": [n * n % 97 + 1, n * n % 89 + 1] for n in range(groups)}

    def test_random_batches_have_chance_distance(self) -> None:
        offered = self.offered()
        names = list(offered)
        batches = [{name: offered[name] for name in names[n : n + 8]} for n in range(0, 40, 8)]
        bias = fold(offered, *batches).bias()
        assert bias.step_ks > 0.1
        assert abs(bias.step_ks_excess) < 0.05

    def test_batches_by_length_are_further_away(self) -> None:
        offered = self.offered()
        names = sorted(offered, key=lambda name: sum(offered[name]))
        batches = [{name: offered[name] for name in names[n : n + 8]} for n in range(0, 40, 8)]
        assert fold(offered, *batches).bias().step_ks_excess > 0.2

    def test_all_in_one_step_is_no_distance(self) -> None:
        offered = self.offered()
        assert fold(offered, offered).bias().step_ks_floor == 0

    def test_it_is_the_mean_distance_of_whole_groups_dealt_out(self) -> None:
        stats = pytest.importorskip("scipy.stats")
        offered = {f"g{n}": [n * n % 97 + 1, *[n * n % 89 + 1] * (n % 3)] for n in range(20)}
        names, rng = list(offered), np.random.default_rng(0)
        every = [length for of in offered.values() for length in of]
        distances = []
        while len(distances) < 100:
            dealt = [names[number] for number in rng.permutation(len(names))]
            for step in (dealt[:12], dealt[12:]):
                lengths = [length for name in step for length in offered[name]]
                distances.append(stats.ks_2samp(lengths, every, method="asymp").statistic)
        batches = ({n: offered[n] for n in names[:12]}, {n: offered[n] for n in names[12:]})
        floor = fold(offered, *batches).bias().step_ks_floor
        assert floor == pytest.approx(sum(distances) / len(distances))

    def test_distance_is_independent_of_delivery_order(self) -> None:
        offered = self.offered()
        names = list(offered)
        one = [{name: offered[name] for name in names[n : n + 8]} for n in range(0, 40, 8)]
        assert fold(offered, *one).bias().step_ks_floor == (
            fold(offered, *reversed(one)).bias().step_ks_floor
        )

    def test_ordered_batches_have_a_chance_distance(self) -> None:
        lengths = list(self.offered().values())
        assert abs(order_excess([lengths[n : n + 8] for n in range(0, 40, 8)])) < 0.05
        lengths.sort(key=sum)
        assert order_excess([lengths[n : n + 8] for n in range(0, 40, 8)]) > 0.2

    def test_a_batch_in_parts_is_one_step(self) -> None:
        offered = {"a": [1], "b": [9]}
        lengths = fold(offered, {"a": [1]})
        lengths.handlers()[Deliver](0.0, deliver(sample("b/0", 9), version=0))
        assert lengths.bias().step_ks == 0
