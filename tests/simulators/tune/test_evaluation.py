"""Evaluation: parts of a trace that share no prompt, and figures that a seed repeats."""

from __future__ import annotations

import random

import msgspec
import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.replay.scenario import Job, TrafficModel
from rollout_sched.simulators.traces.synthetic import synthetic
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.candidates import Candidate, draw, presets
from rollout_sched.simulators.tune.evaluation import Case, Task, bench_of, lasting
from tests.helpers import make_scenario, make_trace
from tests.simulators.tune.bench import candidate, small_bench

BLIND = [
    (role, option.use)
    for role, of_role in space.SPACE.items()
    for option in of_role
    if not option.reads_polls
]
TRACE = synthetic(18, 2, median=20, cap=60, seed=1)


class TestBench:
    def test_a_third_of_the_prompts_is_held_out(self) -> None:
        bench = small_bench()
        search, held_out = set(bench.search.groups), set(bench.held_out.groups)
        assert bench.split
        assert len(search) == 12
        assert len(held_out) == 6
        assert not search & held_out

    def test_the_seed_says_which(self) -> None:
        world = make_scenario(prompts_per_step=4)
        parts = [set(bench_of(TRACE, world, seed=seed).held_out.groups) for seed in (0, 0, 1)]
        assert parts[0] == parts[1] != parts[2]

    def test_too_few_prompts_are_not_split(self) -> None:
        bench = small_bench(prompts=9)
        assert not bench.split
        assert bench.search.groups == bench.held_out.groups

    def test_recorded_arrivals_are_not_split(self) -> None:
        trace = make_trace({f"g{i}": [5, 6] for i in range(20)})
        late = {
            name: [msgspec.structs.replace(sample, arrival_s=float(i)) for sample in members]
            for i, (name, members) in enumerate(trace.groups.items())
        }
        trace = msgspec.structs.replace(trace, groups=late)
        bench = bench_of(trace, make_scenario(prompts_per_step=2), seed=0)
        assert not bench.split
        assert bench(Task({}, Case(3, 1))).failed == ""

    def test_the_job_of_a_part_is_that_of_the_whole(self) -> None:
        world = make_scenario(prompts_per_step=0)
        bench = bench_of(TRACE, world, seed=0)
        assert bench.scenario.job == Job(prompts_per_step=4, samples_per_prompt=2, max_tokens=60)

    def test_the_setting_is_what_the_job_and_the_fleet_are(self) -> None:
        here = small_bench(slots=3, colocated=True).setting(2)
        assert (here.instances, here.slots, here.prompts_per_step) == (2, 6, 4)
        assert (here.disaggregated, here.multi_turn, here.max_staleness) == (False, False, 2)

    def test_where_nobody_trains_there_is_nothing_to_tune(self) -> None:
        world = make_scenario(batches=False, traffic=TrafficModel(rate=1.0, for_s=1.0))
        with pytest.raises(CallerError, match="there is no training"):
            bench_of(TRACE, world, seed=0)

    def test_what_never_fits_is_said_at_once(self) -> None:
        with pytest.raises(CallerError, match="holds 30"):
            bench_of(TRACE, make_scenario(kv_tokens=30), seed=0)


class TestLasting:
    def test_all_prompts_come_before_any_comes_again_under_another_name(self) -> None:
        part = lasting(TRACE, 40, seed=1)
        names = list(part.groups)
        assert len(names) == 40
        assert set(names[:18]) == set(TRACE.groups)
        assert names[18] == f"{names[0]} again 1"
        assert names[36] == f"{names[0]} again 2"
        for name, members in part.groups.items():
            original = TRACE.groups[name.split(" ")[0]]
            assert [s.turns for s in members] == [s.turns for s in original]
            assert all(sample.group == name for sample in members)

    def test_seeds_draw_others(self) -> None:
        assert list(lasting(TRACE, 5, 1).groups) == list(lasting(TRACE, 5, 1).groups)
        assert list(lasting(TRACE, 5, 1).groups) != list(lasting(TRACE, 5, 2).groups)


class TestFigures:
    BENCH = small_bench()

    def test_the_same_question_has_the_same_answer(self) -> None:
        task = Task(candidate(batching="sync", over_prompts=1.5).table, Case(3, 1))
        assert self.BENCH(task) == self.BENCH(task) == small_bench()(task)

    def test_another_seed_or_part_another_answer(self) -> None:
        cases = [Case(3, 1), Case(3, 2), Case(3, 1, held_out=True), Case(4, 1)]
        assert len({self.BENCH(Task({}, case)).total_s for case in cases}) == 4

    def test_every_preset_has_figures(self) -> None:
        for one in presets(self.BENCH.setting(1)):
            figures = self.BENCH(Task(one.table, Case(4, 1)))
            assert figures.failed == ""
            assert figures.tokens_per_s > 0
            assert figures.staleness_max <= 1

    def test_without_over_sampling_nothing_is_biased(self) -> None:
        figures = self.BENCH(Task({}, Case(4, 1)))
        assert figures.length_ratio == pytest.approx(1.0)
        assert figures.longest_kept == pytest.approx(1.0)
        assert figures.staleness_max == 0
        assert figures.discarded == 0

    def test_a_policy_that_cannot_be_is_a_failure_and_no_error(self) -> None:
        broken = Candidate({"batching": {"use": "one_step_off"}, "freshness": {"use": "bounded"}})
        figures = self.BENCH(Task(broken.table, Case(4, 1)))
        assert "max_staleness" in figures.failed


def test_what_takes_too_long_is_a_failure() -> None:
    assert "run not finished after 5 s" in small_bench()(Task({}, Case(3, 1), give_up_s=5.0)).failed


@pytest.mark.parametrize(("role", "use"), BLIND)
def test_without_polls_who_does_not_read_them_does_the_same(
    role: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks what the space says of each policy: polls are left out to save time."""
    bench = small_bench(slots=3, kv_tokens=400, poll_s=1.0, colocated=True)
    here, dice = bench.setting(2), random.Random(1)
    drawn = (draw(here, dice) for _ in range(2000))
    found = next((one for one in drawn if one.table[role]["use"] == use), None)
    if found is None:
        pytest.skip("not for this setting")
    task = Task(found.table, Case(3, 1), give_up_s=5_000.0)
    blind = not space.reads_polls(found.table)
    fast = bench(task)
    monkeypatch.setattr(space, "reads_polls", lambda table: True)
    assert not blind or bench(task) == fast
