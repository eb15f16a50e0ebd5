"""Limits: what exceeds one is said, and what is measured several times is put together."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from benchmarks.synthetic import synthetic
from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.replay.scenario import Job, TrafficModel
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.candidates import Candidate, draw, presets
from rollout_sched.simulators.tune.evaluation import (
    BudgetSpent,
    Case,
    CaseFigures,
    HardLimits,
    ResultCache,
    SpeedUp,
    Task,
    bench_of,
    lasting,
    simplest_of_the_best,
    speed_up,
    together,
)
from tests.helpers import make_scenario, make_trace
from tests.simulators.tune.bench import Oracle, candidate, faster_with_more_prompts, small_bench

SOUND = CaseFigures(
    tokens_per_s=1.0, staleness_max=1, length_ratio=0.99, longest_kept=0.98, step_bias=0.1
)
LIMITS = HardLimits(max_staleness=1, max_length_bias=0.01, max_step_bias=0.1)


def test_at_the_limit_is_allowed() -> None:
    assert LIMITS.exceeded(SOUND) == []
    assert LIMITS.excess(SOUND) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("staleness_max", 2, "staleness 2 above 1"),
        ("length_ratio", 0.97, "length bias 0.030 above 0.01"),
        ("length_ratio", 1.03, "length bias 0.030 above 0.01"),
        ("longest_kept", 0.9, "length bias 0.050 above 0.01"),
        ("step_bias", 0.2, "step bias 0.200 above 0.1"),
    ],
)
def test_each_limit(field: str, value: float, said: str) -> None:
    figures = msgspec.structs.replace(SOUND, **{field: value})
    assert LIMITS.exceeded(figures) == [said]
    assert LIMITS.excess(figures) > 0


def test_a_failed_run_exceeds_every_limit() -> None:
    assert LIMITS.exceeded(CaseFigures(failed="it stood still")) == ["it stood still"]


def test_together_takes_means_and_the_stalest() -> None:
    figures = together(
        [
            CaseFigures(tokens_per_s=1.0, staleness_max=0),
            CaseFigures(tokens_per_s=3.0, staleness_max=2),
        ]
    )
    assert figures.tokens_per_s == 2.0
    assert figures.staleness_max == 2
    assert figures.length_ratio == 1.0


def test_one_failure_is_a_failure() -> None:
    assert together([SOUND, CaseFigures(failed="no")]).failed == "no"


def test_tightened_limits_allow_less_bias_and_the_same_staleness() -> None:
    assert HardLimits(2, 0.1, 0.4).tightened(0.25) == HardLimits(
        2, pytest.approx(0.075), pytest.approx(0.3)
    )


def at(*speeds: float) -> list[CaseFigures]:
    return [CaseFigures(tokens_per_s=speed) for speed in speeds]


def test_seeds_fall_out() -> None:
    ratio = speed_up(at(11, 110, 1100), at(10, 100, 1000))
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_is_students() -> None:
    ratio = speed_up(at(math.exp(0.1), math.exp(0.3)), at(1, 1))
    assert ratio.mean == pytest.approx(math.exp(0.2))
    half = 12.706 * math.sqrt(0.02 * (1 + 1 / 2))
    assert ratio.low == pytest.approx(math.exp(0.2 - half))
    assert ratio.high == pytest.approx(math.exp(0.2 + half))


def test_many_seeds_have_an_interval_too() -> None:
    ratio = speed_up(at(*[1.1, 1.2] * 10), at(*[1.0] * 20))
    assert ratio.low < 1.1 < ratio.mean < 1.2 < ratio.high, "of 20 draws one is outside"


def test_one_case_leaves_something_open() -> None:
    ratio = speed_up(at(1.04), at(1.0))
    assert ratio.low < 1.0 < ratio.high


def test_a_speed_up_is_written_with_its_interval() -> None:
    assert str(SpeedUp(1.256, 1.2, 1.3)) == "1.26x [1.20, 1.30]"


class TestChoice:
    def choose(self, speeds: dict[str, list[float]], departures: dict[str, int]) -> str:
        return simplest_of_the_best(
            list(speeds),
            lambda one, other: speed_up(at(*speeds[one]), at(*speeds[other])),
            lambda one: departures[one],
        )

    def test_the_faster_wins_by_more_than_the_spread(self) -> None:
        speeds = {"plain": [1.0, 1.0, 1.0], "odd": [1.2, 1.21, 1.22]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "odd"

    def test_within_the_spread_the_simpler(self) -> None:
        speeds = {"odd": [1.05, 0.98, 1.02], "plain": [1.0, 1.0, 1.0]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "plain"

    def test_a_wide_spread_does_not_excuse_a_slow_one(self) -> None:
        speeds = {"odd": [1.5, 1.0, 1.1], "plain": [1.0, 1.0, 1.0]}
        assert self.choose(speeds, {"plain": 0, "odd": 5}) == "odd"

    def test_the_faster_of_equally_simple_candidates_wins(self) -> None:
        speeds = {"one": [1.0, 1.01], "other": [1.01, 1.005]}
        assert self.choose(speeds, {"one": 1, "other": 1}) == "other"


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
        assert bench.scenario.job == Job(
            prompts_per_step=4, samples_per_prompt=2, max_tokens=60, redraws=False
        )

    def test_the_setting_is_what_the_job_and_the_fleet_are(self) -> None:
        here = small_bench(slots=3, colocated=True).setting(2)
        assert (here.instances, here.slots, here.prompts_per_step) == (2, 6, 4)
        assert (here.disaggregated, here.multi_turn, here.max_staleness) == (False, False, 2)

    def test_tuning_without_a_trainer_is_refused(self) -> None:
        world = make_scenario(batches=False, traffic=TrafficModel(rate=1.0, for_s=1.0))
        with pytest.raises(CallerError, match="there is no training"):
            bench_of(TRACE, world, seed=0)

    def test_requests_that_never_fit_are_refused_at_once(self) -> None:
        with pytest.raises(CallerError, match="holds 30"):
            bench_of(TRACE, make_scenario(kv_tokens=30), seed=0)


class TestLasting:
    def test_prompts_repeat_only_after_all_were_used(self) -> None:
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

    def test_another_seed_or_part_changes_the_answer(self) -> None:
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


def test_a_timeout_is_a_failure() -> None:
    assert "run not finished after 5 s" in small_bench()(Task({}, Case(3, 1), give_up_s=5.0)).failed


@pytest.mark.parametrize(("role", "use"), BLIND)
def test_policies_that_ignore_polls_are_unchanged_without_polls(
    role: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks what the space says of each policy: polls are left out to save time."""
    bench = small_bench(slots=3, kv_tokens=400, poll_s=1.0, colocated=True)
    here, rng = bench.setting(2), random.Random(1)
    drawn = (draw(here, rng) for _ in range(2000))
    found = next((one for one in drawn if one.table[role]["use"] == use), None)
    if found is None:
        pytest.skip("not for this setting")
    task = Task(found.table, Case(3, 1), give_up_s=5_000.0)
    blind = not space.reads_polls(found.table)
    fast = bench(task)
    monkeypatch.setattr(space, "reads_polls", lambda table: True)
    assert not blind or bench(task) == fast


ONE, TWO = (
    candidate(batching="sync", over_prompts=1.0),
    candidate(batching="sync", over_prompts=2.0),
)
CASES = (Case(4, 1), Case(4, 2))


def forever_book() -> float:
    return 1.0


def open_book(oracle: Oracle, evaluations: int | None = None) -> ResultCache:
    return ResultCache(lambda tasks: oracle.answers(tasks, forever_book), evaluations=evaluations)


def test_case_by_case_and_nothing_twice() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = open_book(oracle)
    book.measure([ONE, TWO, ONE], CASES)
    assert [(task.table, task.case) for task in oracle.tasks] == [
        (one.table, case) for case in CASES for one in (ONE, TWO)
    ]
    book.measure([TWO, ONE], CASES)
    assert len(oracle.tasks) == len(book) == 4
    assert ONE in book
    assert candidate(batching="one_step_off") not in book
    assert book.speed_up(TWO, ONE, CASES).mean == pytest.approx(2.0)


def test_the_budget_of_evaluations_is_kept() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = open_book(oracle, evaluations=3)
    with pytest.raises(BudgetSpent):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 3
    assert book.knows(ONE, CASES)
    assert not book.knows(TWO, CASES)
    with pytest.raises(BudgetSpent):
        book.measure([TWO], CASES)
    assert len(oracle.tasks) == 3


def test_just_enough_is_not_too_few() -> None:
    book = open_book(Oracle(faster_with_more_prompts), evaluations=4)
    book.measure([ONE, TWO], CASES)
    assert len(book) == 4


def test_results_before_an_interruption_are_kept() -> None:
    book = open_book(Oracle(faster_with_more_prompts, stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 3
    assert book.figures_of(ONE, CASES)[0].tokens_per_s == 200.0


def test_answers_that_end_early_are_the_end() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = ResultCache(lambda tasks: oracle.answers(tasks, lambda: 2.0 - oracle.now))
    with pytest.raises(BudgetSpent):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 2


def test_the_reference_comes_first_and_says_when_to_give_up() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = ResultCache(lambda tasks: oracle.answers(tasks, forever_book), ONE)
    book.measure([TWO, ONE], CASES)
    assert [(task.table, task.case.seed) for task in oracle.tasks] == [
        (ONE.table, 1),
        (ONE.table, 2),
        (TWO.table, 1),
        (TWO.table, 2),
    ]
    assert [task.give_up_s for task in oracle.tasks] == [math.inf, math.inf, 20.0, 20.0]
