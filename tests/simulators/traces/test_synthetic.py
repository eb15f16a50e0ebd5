"""Samples that nobody recorded: resampled prompts, and whole workloads."""

import pytest

from benchmarks.synthetic import synthetic
from rollout_sched.simulators.traces import SampleRecord, Trace, Turn, gather, read
from rollout_sched.simulators.traces.command import statistics
from rollout_sched.simulators.traces.model import resampled


class TestResampled:
    trace = read("lrm_math_open")

    def test_as_many_prompts_of_the_same_lengths_under_names_of_their_own(self) -> None:
        drawn = resampled(self.trace, 1)
        assert len(drawn.groups) == len(self.trace.groups)
        recorded = [[s.turns for s in members] for members in self.trace.groups.values()]
        found = [[s.turns for s in members] for members in drawn.groups.values()]
        assert all(turns in recorded for turns in found)
        assert {s.group for s in drawn.samples()} == set(drawn.groups)

    def test_some_are_drawn_again_and_some_never(self) -> None:
        names = [name.partition(".")[2] for name in resampled(self.trace, 1).groups]
        assert 0.5 < len(set(names)) / len(self.trace.groups) < 0.75  # 1 - 1 / e

    def test_the_number_fixes_it(self) -> None:
        assert resampled(self.trace, 1) == resampled(self.trace, 1) != resampled(self.trace, 2)

    def test_the_cap_stays_though_the_longest_may_be_missing(self) -> None:
        assert {resampled(self.trace, n).cap for n in range(9)} == {self.trace.cap}

    def test_arrivals_stay_in_order(self) -> None:
        samples = [SampleRecord(f"g{n}", 0, 1, (Turn(1),), arrival_s=float(n)) for n in range(9)]
        drawn = resampled(Trace("t", gather(samples)), 1)
        arrivals = [members[0].arrival_s for members in drawn.groups.values()]
        assert arrivals == sorted(arrivals)


class TestSynthetic:
    def test_synthetic_has_the_asked_shape(self) -> None:
        trace = synthetic(2000, 8, median=1000, sigma_between=0.8, sigma_within=0.5, cap=20_000)
        found = statistics(trace)
        assert (found.groups, found.group_size) == (2000, 8)
        assert found.response_p50 == pytest.approx(1000, rel=0.1)
        assert found.icc_log == pytest.approx(0.64 / 0.89, abs=0.03)
        assert found.response_max == 20_000 == trace.cap
        cut = [s for s in trace.samples() if s.finish == "length"]
        assert cut
        assert all(s.response_tokens == 20_000 for s in cut)
        assert synthetic(3, 2, seed=5) == synthetic(3, 2, seed=5) != synthetic(3, 2, seed=6)

    @pytest.mark.parametrize("wrong", [{"median": 0}, {"cap": 0}, {"sigma_within": -1}])
    def test_synthetic_refuses_nonsense(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="expected a number"):
            synthetic(1, 1, **wrong)
