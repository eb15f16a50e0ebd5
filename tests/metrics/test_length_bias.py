"""Trained against offered lengths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core import events as ev
from tests.metrics.tape import Tape, deliver, sample

OFFERED = {"a": [10, 20], "b": [30, 40]}


class TestLengthBias:
    def bias(self, *batches: dict[str, list[int]]) -> Any:
        tape = Tape(offered=OFFERED.__getitem__)
        tape.join("i")
        for version, groups in enumerate(batches):
            samples = [
                sample(f"{group}/{i}", length)
                for group, lengths in groups.items()
                for i, length in enumerate(lengths)
            ]
            tape.at(version, ev.BatchRequested(), deliver(*samples, version=version))
        return tape.metrics.summary(10.0).length_bias

    def test_none_if_all_that_was_offered_is_trained(self) -> None:
        bias = self.bias({"a": [20, 10], "b": [30, 40]})
        assert (bias.mean_ratio, bias.ks, bias.step_ks, bias.group_ratio) == (1, 0, 0, 1)

    def test_short_first_shows_in_the_steps_alone(self) -> None:
        bias = self.bias({"a": [10, 20]}, {"b": [30, 40]})
        assert (bias.mean_ratio, bias.ks, bias.group_ratio) == (1, 0, 1)
        assert bias.step_ks == 0.5

    def test_parts_of_a_batch_are_one_step(self) -> None:
        tape = Tape(offered=OFFERED.__getitem__)
        tape.join("i")
        a, b = (
            [sample(f"{group}/{i}", length) for i, length in enumerate(lengths)]
            for group, lengths in OFFERED.items()
        )
        tape.at(0, ev.BatchRequested(), deliver(*a, last=False))
        assert tape.metrics.summary(1.0).length_bias.group_ratio == 1.0
        tape.at(1, ev.Woke(), deliver(*b, part=1))
        assert tape.metrics.summary(2.0).length_bias.step_ks == 0.0

    def test_the_shortest_of_each_group(self) -> None:
        bias = self.bias({"a": [10, 10], "b": [30, 30]})
        assert bias.mean_ratio == 20 / 25
        assert bias.group_ratio == pytest.approx((10 / 15 + 30 / 35) / 2)
        assert bias.ks == 0.25

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
        tape = Tape(offered=lambda group: offered)
        tape.join("i")
        batch = deliver(*(sample(f"a/{i}", length) for i, length in enumerate(trained)))
        tape.at(0, ev.BatchRequested(), batch)
        expected = stats.ks_2samp(trained, offered, method="asymp").statistic
        assert tape.metrics.summary(1.0).length_bias.ks == pytest.approx(expected)
