"""The workload: the same prompts for every policy, in an order that the seed fixes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.simulators.replay.scenario import Job, TrafficModel
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import make_scenario, make_trace

TRACE = make_trace({f"g{i}": [10 + i, 20 + i, 30 + i] for i in range(12)})


class TestOrder:
    def test_seed_0_keeps_the_trace_s(self) -> None:
        assert Workload(TRACE, Job()).groups == list(TRACE.groups)

    def test_other_seeds_shuffle_reproducibly(self) -> None:
        first, again = Workload(TRACE, Job(), seed=3), Workload(TRACE, Job(), seed=3)
        assert first.groups == again.groups != list(TRACE.groups)
        assert sorted(first.groups) == sorted(TRACE.groups)
        assert first.groups != Workload(TRACE, Job(), seed=4).groups

    def test_recorded_arrivals_are_never_shuffled(self) -> None:
        samples = [
            msgspec.structs.replace(sample, arrival_s=float(number))
            for number, sample in enumerate(TRACE.samples())
        ]
        trace = Trace("t", gather(samples))
        load = Workload(trace, Job(), seed=3)
        assert load.groups == list(trace.groups)
        assert load.arrival_s("g1") == 3.0  # its first sample's

    def test_steps_take_the_head_of_the_order(self) -> None:
        whole = Workload(TRACE, Job(prompts_per_step=4), seed=5).groups
        assert Workload(TRACE, Job(prompts_per_step=4), steps=2, seed=5).groups == whole[:8]
        assert Workload(TRACE, Job(prompts_per_step=4), steps=99, seed=5).groups == whole


class TestJob:
    def test_left_out_it_comes_from_the_trace(self) -> None:
        load = Workload(TRACE, Job())
        assert (load.prompts_per_step, load.samples_per_prompt, load.max_tokens) == (3, 3, 41)

    def test_a_large_trace_gets_64_prompts_a_step(self) -> None:
        trace = make_trace({str(i): [1] for i in range(400)})
        assert Workload(trace, Job()).prompts_per_step == 64

    def test_a_tiny_trace_gets_one(self) -> None:
        assert Workload(make_trace({"a": [1]}), Job()).prompts_per_step == 1

    def test_given_it_is_taken(self) -> None:
        load = Workload(TRACE, Job(5, 2, 15))
        assert (load.prompts_per_step, load.samples_per_prompt, load.max_tokens) == (5, 2, 15)

    def test_the_cap_cuts_and_says_so(self) -> None:
        load = Workload(TRACE, Job(max_tokens=15))
        assert load.sample("g0", 0).finish == "stop"
        assert load.sample("g0", 1).finish == "length"
        assert load.offered("g0") == [10, 15, 15]

    def test_offered_tokens_are_those_requested(self) -> None:
        assert Workload(TRACE, Job(samples_per_prompt=2)).offered("g3") == [13, 23]
        offered = Workload(TRACE, Job(samples_per_prompt=2)).offered_samples()
        assert len(list(offered)) == 24


class TestGrowth:
    @given(
        st.floats(0.1, 10.0),
        st.integers(1, 7),
        st.integers(1, 3),
        st.lists(st.integers(1, 300), min_size=1, max_size=12),
        st.integers(0, 600),
    )
    def test_the_last_step_is_so_many_times_as_long_as_the_first(
        self, growth: float, prompts: int, epochs: int, lengths: list[int], cap: int
    ) -> None:
        """Step k of n by growth^(k / (n - 1)), cut at the cap, drawn samples as recorded ones."""
        trace = make_trace({f"g{i}": [length] * 2 for i, length in enumerate(lengths)})
        job = Job(prompts, 3, cap, epochs=epochs)
        usual, grown = (
            Workload(trace, job),
            Workload(trace, msgspec.structs.replace(job, growth=growth)),
        )
        last = max(1, -(-len(grown.groups) // prompts) - 1)
        assert grown.groups == usual.groups
        for number, group in enumerate(grown.groups):
            factor = growth ** (number // prompts / last)
            assert grown.offered(group) == [grown.length(group, i) for i in range(3)]
            for index, length in enumerate(usual.offered(group)):
                if index < 2 and group in trace.groups:
                    length = trace.groups[group][index].response_tokens
                elif length == usual.max_tokens:
                    continue  # how long it was drawn does not show
                grows_to = min(grown.max_tokens, max(1, round(length * factor)))
                assert grown.length(group, index) == grows_to

    def test_all_turns_grow_and_observations_do_not(self) -> None:
        turns = (Turn(2, 7, 1.0), Turn(3))
        samples = [SampleRecord(name, 0, 4, turns) for name in "ab"]
        load = Workload(Trace("t", gather(samples)), Job(1, max_tokens=9, growth=2.0))
        assert load.sample("a", 0).turns == turns
        assert load.sample("b", 0).turns == (Turn(4, 7, 1.0), Turn(5))
        assert load.sample("b", 0).finish == "length"

    def test_redrawn_samples_grow_too(self) -> None:
        trace = make_trace({"a": [5, 5], "b": [5, 5]})
        load = Workload(trace, Job(1, max_tokens=99, redraws=True, growth=2.0))
        assert [load.begin("b", 0).response_tokens for _ in range(2)] == [10, 10]


class TestDrawing:
    def test_missing_samples_are_drawn_and_counted_once(self) -> None:
        load = Workload(TRACE, Job(samples_per_prompt=5))
        assert load.drawn == 0
        drawn = [load.length("g2", index) for index in (3, 4, 3, 4)]
        assert all(1 <= length <= TRACE.cap for length in drawn)
        assert drawn[:2] == drawn[2:]
        assert load.drawn == 2
        assert load.sample("g2", 3).sample == 3

    def test_the_same_in_any_order_of_asking(self) -> None:
        asked = [(f"g{i}", index) for i in range(12) for index in (3, 4, 5)]
        forwards, backwards = Workload(TRACE, Job()), Workload(TRACE, Job())
        one = {key: forwards.length(*key) for key in asked}
        other = {key: backwards.length(*key) for key in reversed(asked)}
        assert one == other

    def test_another_seed_draws_others(self) -> None:
        def drawn(seed: int) -> list[int]:
            load = Workload(TRACE, Job(), seed=seed)
            return [load.length(f"g{i}", 3) for i in range(12)]

        assert drawn(1) == drawn(1) != drawn(2)

    def test_drawn_samples_are_capped(self) -> None:
        load = Workload(TRACE, Job(max_tokens=5))
        assert load.length("g0", 7) == 5


class TestEpochs:
    trace = make_trace({f"g{i}": [10 * i + index for index in range(8)] for i in range(1, 7)})

    def load(self, epochs: int, samples: int = 0, *, seed: int = 0, steps: int = 0) -> Workload:
        return Workload(self.trace, Job(2, samples, epochs=epochs), seed=seed, steps=steps)

    def test_every_prompt_is_a_group_of_its_own_in_every_epoch(self) -> None:
        load = self.load(3)
        assert len(set(load.groups)) == 18
        assert load.groups[:6] == load.prompts == list(self.trace.groups)
        for mark, epoch in (("@2", load.groups[6:12]), ("@3", load.groups[12:])):
            assert sorted(epoch) == [f"g{i}{mark}" for i in range(1, 7)]
            assert sorted(map(load.prompt, epoch)) == list(self.trace.groups)

    def test_each_is_in_an_order_of_its_own_that_the_seed_fixes(self) -> None:
        def orders(seed: int) -> list[list[str]]:
            load = self.load(3, seed=seed)
            return [[load.prompt(g) for g in load.groups[n : n + 6]] for n in (0, 6, 12)]

        assert orders(0) == orders(0) != orders(1)
        assert len({tuple(order) for seed in (0, 1) for order in orders(seed)}) == 6

    def test_each_trains_samples_that_no_other_trains(self) -> None:
        load = self.load(3)
        assert load.samples_per_prompt == 2  # of 8
        trained: dict[str, list[int]] = {}
        for group in load.groups:
            trained.setdefault(load.prompt(group), []).extend(load.offered(group))
        assert all(len(set(lengths)) == 6 for lengths in trained.values())
        assert {s.group for s in load.offered_samples()} == set(load.groups)

    def test_a_trace_that_has_too_few_for_that_is_refused(self) -> None:
        with pytest.raises(CallerError, match=r"5 epochs .* need 10 samples of a prompt.* most 4"):
            self.load(5)
        assert self.load(4).samples_per_prompt == 2

    def test_missing_samples_of_an_epoch_are_drawn(self) -> None:
        load = self.load(2, 5)
        assert load.offered("g1") == [10, 11, 12, 13, 14]
        second = load.offered("g1@2")
        assert second[:3] == [15, 16, 17]
        assert load.drawn == 2

    def test_a_trace_may_use_the_mark_itself(self) -> None:
        trace = make_trace({"a": [1, 2, 3, 4], "a@2": [1, 2, 3, 4]})
        load = Workload(trace, Job(epochs=2))
        assert sorted(load.groups) == ["a", "a@2", "a@2@@2", "a@@2"]
        assert load.prompt("a@2") == "a@2"
        assert load.prompt("a@@2") == "a"

    def test_steps_count_through_the_epochs(self) -> None:
        assert self.load(2, steps=4).groups == self.load(2).groups[:8]

    def test_the_trainer_names_prompt_and_group(self) -> None:
        load = self.load(2)
        assert load.submission("g3@2") == GroupSubmitted("g3@2", 4, 4, 67, "g3")
        assert load.submission("g3") == GroupSubmitted("g3", 4, 4, 67, "g3")

    def test_arrivals_were_once(self) -> None:
        samples = [msgspec.structs.replace(sample, arrival_s=1.0) for sample in TRACE.samples()]
        with pytest.raises(CallerError, match="leave epochs at 1"):
            Workload(Trace("t", gather(samples)), Job(epochs=2, samples_per_prompt=2))


class TestRedraws:
    """What starts over may do something else."""

    RECORDED = tuple(range(1, 101))

    def load(self, **job: int) -> Workload:
        return Workload(make_trace({"g": list(self.RECORDED)}), Job(**job))

    def test_only_restarted_samples_are_redrawn(self) -> None:
        load = self.load()
        assert load.begin("g", 7) == load.sample("g", 7) == load.trace.groups["g"][7]
        lengths = [load.begin("g", 7).response_tokens for _ in range(20)]
        assert len(set(lengths)) > 10
        assert max(lengths) <= 100
        assert load.length("g", 7) == load.sample("g", 7).response_tokens == lengths[-1]
        assert load.length("g", 8) == 9

    def test_redraws_do_not_change_the_trainers_offer(self) -> None:
        load = self.load()
        for _ in range(3):
            load.begin("g", 7)
        assert load.offered("g") == list(self.RECORDED)

    def test_every_run_draws_the_same(self) -> None:
        runs = [self.load(), self.load()]
        for load in runs:
            load.begin("g", 7)
        first, again = (load.begin("g", 7) for load in runs)
        assert first == again
        assert (first.group, first.sample) == ("g", 7)

    def test_drawn_samples_are_capped(self) -> None:
        load = self.load(max_tokens=5)
        assert max(load.begin("g", 50).response_tokens for _ in range(20)) == 5

    def test_without_it_nothing_changes(self) -> None:
        load = Workload(TRACE, Job(redraws=False))
        assert {load.begin("g1", 0).response_tokens for _ in range(9)} == {11}


class TestCutSamples:
    def test_each_seed_completes_them_differently(self) -> None:
        """A sample that ended is as recorded, one that was cut goes on up to the cap."""
        samples = [
            SampleRecord(f"g{i}", j, 4, (Turn(10 + 7 * i * j),), finish="cut" if j == 3 else "stop")
            for i in range(1, 20)
            for j in range(4)
        ]
        trace = Trace("t", gather(samples), max_response_tokens=500)
        loads = [Workload(trace, Job(), seed=seed) for seed in range(5)]
        for load in loads:
            for was in samples:
                now = load.sample(was.group, was.sample).response_tokens
                assert was.response_tokens <= now <= 500
                assert now == was.response_tokens or was.finish == "cut"
            offered = sum(map(sum, map(load.offered, load.groups)))
            seen = sum(sample.response_tokens for sample in samples)
            assert load.guessed_share == pytest.approx(1 - seen / offered)
        assert len({load.guessed_share for load in loads}) == 5
        assert Workload(TRACE, Job()).guessed_share == 0


class TestKnownSamples:
    """What a trainer knows that has met the prompts before."""

    def test_known_samples_reveal_lengths_and_are_not_trained(self) -> None:
        load = Workload(TRACE, Job(known_samples=1))
        assert load.samples_per_prompt == 2
        assert load.offered("g1") == [11, 21]
        assert load.submission("g1").history == (31,)

    def test_over_sampling_does_not_bring_them_back(self) -> None:
        load = Workload(TRACE, Job(known_samples=1))
        load.length("g1", 2)
        assert load.drawn == 1

    def test_known_lengths_hold_in_every_epoch(self) -> None:
        trace = make_trace({"p": [1, 2, 3, 4, 5, 6]})
        load = Workload(trace, Job(known_samples=2, epochs=2))
        assert [load.offered(group) for group in load.groups] == [[1, 2], [3, 4]]
        assert [load.submission(group).history for group in load.groups] == [(5, 6), (5, 6)]

    def test_a_short_group_keeps_one_to_train(self) -> None:
        trace = make_trace({"p": [1, 2, 3, 4], "q": [7]})
        load = Workload(trace, Job(known_samples=2))
        assert (load.length("q", 0), load.submission("q").history) == (7, ())

    def test_known_samples_leave_one_to_train(self) -> None:
        with pytest.raises(CallerError, match="known_samples to at most 2"):
            Workload(TRACE, Job(known_samples=3))


class TestFits:
    def test_names_group_need_and_remedy(self) -> None:
        load = Workload(make_trace({"small": [5], "big": [90]}, prompt=10, name="mine"), Job())
        load.check_fits(make_scenario(kv_tokens=100))
        with pytest.raises(CallerError) as caught:
            load.check_fits(make_scenario(kv_tokens=99))
        text = str(caught.value)
        assert "trace mine: group 'small' may need 100 tokens" in text
        assert "scenario tiny holds 99" in text
        assert "set job.max_tokens lower" in text
        assert "fleet.kv_tokens" in text

    def test_a_lower_cap_is_a_remedy(self) -> None:
        trace = make_trace({"big": [90]}, prompt=10)
        Workload(trace, Job(max_tokens=50)).check_fits(make_scenario(kv_tokens=60))

    def test_observations_need_room_too(self) -> None:
        trace = Trace("t", gather([SampleRecord("a", 0, 10, (Turn(5, 70, 1.0), Turn(5)))]))
        Workload(trace, Job()).check_fits(make_scenario(kv_tokens=90))
        with pytest.raises(CallerError, match="may need 90 tokens"):
            Workload(trace, Job()).check_fits(make_scenario(kv_tokens=89))

    def test_the_model_s_length_is_a_limit_too(self) -> None:
        scenario = make_scenario()
        fleet = msgspec.structs.replace(scenario.fleet, max_model_len=99)
        with pytest.raises(CallerError, match=r"may need 100 tokens.*holds 99"):
            Workload(make_trace({"a": [90]}, prompt=10), Job()).check_fits(
                msgspec.structs.replace(scenario, fleet=fleet)
            )


class TestTraffic:
    def test_without_batches_there_are_no_prompts(self) -> None:
        model = TrafficModel(rate=1.0, for_s=9.0)
        load = Workload(TRACE, Job(batches=False), traffic=model)
        assert not load.groups
        assert load.traffic is not None
        assert not load.offered_samples()

    def test_a_conversation_that_fits_nowhere_is_refused(self) -> None:
        trace = make_trace({"small": [5]}, prompt=10)
        load = Workload(trace, Job(), traffic=TrafficModel(rate=1.0, for_s=9.0, max_tokens=70))
        load.check_fits(make_scenario(kv_tokens=80))
        with pytest.raises(CallerError, match=r"may need 80 tokens.*set traffic\.max_tokens lower"):
            load.check_fits(make_scenario(kv_tokens=79))

    def test_an_oracle_is_told_of_clients_too(self) -> None:
        load = Workload(TRACE, Job(), traffic=TrafficModel(rate=1.0, for_s=9.0))
        asked = load.traffic.conversations()[0]
        assert load.length(asked.group, 3) == load.traffic.length(asked.group)
