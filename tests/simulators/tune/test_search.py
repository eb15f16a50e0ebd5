"""The search: the better third goes on, what is near the best comes next, and seeds decide all."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.simulators.tune.candidates import BASELINES, Candidate, presets
from rollout_sched.simulators.tune.evaluation import (
    BudgetSpent,
    Case,
    CaseFigures,
    HardLimits,
    ResultCache,
    Task,
)
from rollout_sched.simulators.tune.search import (
    Ranking,
    Search,
    frontier,
    ranking,
    rungs,
    steps_for,
)
from tests.simulators.tune.bench import Oracle, candidate, faster_with_more_prompts, setting

LIMITS = HardLimits(max_staleness=0, max_length_bias=0.01, max_step_bias=0.051)


def searched(
    evaluations: int,
    formula=faster_with_more_prompts,
    limits: HardLimits = LIMITS,
    seed: int = 0,
    **changes: int,
) -> tuple[Search, ResultCache, Oracle]:
    oracle = Oracle(formula)
    book = ResultCache(lambda tasks: oracle.answers(tasks, lambda: 1.0), evaluations=evaluations)
    here = setting(max_staleness=limits.max_staleness, **changes)
    search = Search(here, limits, book, rungs(24), seed=seed)
    with pytest.raises(BudgetSpent):
        search.run()
    return search, book, oracle


def test_rungs_grow_in_steps_and_seeds() -> None:
    assert [[(case.steps, case.seed) for case in rung] for rung in rungs(24)] == [
        [(8, 1)],
        [(16, 1), (16, 2)],
        [(24, 1), (24, 2)],
    ]
    assert not any(case.held_out for rung in rungs(24) for case in rung)
    assert [case.steps for rung in rungs(1) for case in rung] == [1] * 5


def test_async_runs_are_long_enough_to_be_steady() -> None:
    assert [steps_for(most) for most in (0, 1, 5, 8)] == [24, 24, 24, 36]


def test_the_search_finds_the_fastest_within_the_limits() -> None:
    search, _, _ = searched(300)
    batching = search.best(1)[0].table["batching"]
    # 2.0 is faster but too biased
    assert (batching["use"], batching["over_prompts"]) == ("sync", 1.5)


def test_the_first_bracket_holds_the_baselines_and_a_quarter_goes_on() -> None:
    _, book, oracle = searched(60)
    cases = [task.case for task in oracle.tasks]
    first = cases.index(Case(16, 1))
    second = cases.index(Case(16, 2)) - first
    baselines = [one.preset for one in book.candidates.values() if one.preset in BASELINES]
    assert set(cases[:first]) == {Case(8, 1)}
    assert [task.table for task in oracle.tasks[: len(baselines)]] == [
        one.table for one in presets(setting(max_staleness=0)) if one.preset in baselines
    ]
    beside = 3  # for the frontier, the best preset, the reference
    assert 2 <= second <= first / 4 + 1 + beside


def test_the_same_seed_searches_the_same() -> None:
    _, _, one = searched(120, seed=3)
    _, _, two = searched(120, seed=3)
    _, _, other = searched(120, seed=4)
    assert one.tasks == two.tasks
    assert one.tasks != other.tasks


def test_a_longer_search_begins_as_a_shorter_one() -> None:
    _, _, short = searched(70)
    _, _, long = searched(140)
    assert long.tasks[:70] == short.tasks


def test_failed_candidates_are_dropped() -> None:
    def only_plain(task: Task) -> CaseFigures:
        if task.table.get("routing", {}).get("use") == "round_robin":
            return faster_with_more_prompts(task)
        return CaseFigures(failed="no")

    search, _, oracle = searched(150, only_plain)
    assert all(one.table["routing"]["use"] == "round_robin" for one in search.best(99))
    failed_later = [
        task
        for task in oracle.tasks
        if task.case.steps > 8
        and task.table.get("routing", {}).get("use") != "round_robin"
        and task.table not in [one.table for one in presets(setting(max_staleness=0))]
    ]
    assert failed_later == []


def test_the_search_draws_on_while_no_candidate_keeps_the_limits() -> None:
    def biased(task: Task) -> CaseFigures:
        return CaseFigures(tokens_per_s=1.0, step_bias=1.0)

    search, book, _ = searched(150, biased)
    assert search.best(5) == []
    assert len(book) == 150


def test_a_candidate_that_is_stale_in_one_case_is_not_among_the_best() -> None:
    def stale_on_seed_two(task: Task) -> CaseFigures:
        return CaseFigures(tokens_per_s=1.0, staleness_max=int(task.case.seed == 2))

    search, book, _ = searched(150, stale_on_seed_two)
    assert all(not book.knows(one, rungs(24)[1]) for one in search.best(99))


def test_only_the_simplest_of_equal_candidates_advances() -> None:
    search, _, _ = searched(300)
    parents = search.best(5)
    speeds = [faster_with_more_prompts(Task(one.table, Case(24, 1))) for one in parents]
    assert len(set(speeds)) >= 3
    assert parents[0].departures <= 2


def test_neighbours_of_fast_candidates_above_a_limit_are_tried() -> None:
    """Here the only way to be fast and allowed lies beside what is fast and not allowed."""

    def narrow(task: Task) -> CaseFigures:
        row = task.table.get("batching", {})
        fast = row.get("use") == "pooled"
        biased = fast and row.get("batches", 4) != 3
        return CaseFigures(tokens_per_s=2.0 if fast else 1.0, step_bias=float(biased))

    search, _, _ = searched(150, narrow)
    assert search.best(1)[0].table["batching"]["batches"] == 3


CASES = (Case(8, 1, held_out=True), Case(8, 2, held_out=True))
LIMITS_RANKING = HardLimits(0, 0.01, 0.051)
PLAIN, FASTER, BIASED = (candidate(batching="sync", over_prompts=over) for over in (1.0, 1.5, 2.0))
ODD = candidate(batching="sync", over_prompts=1.5, ordering="shortest_first")


def measured(*candidates: Candidate, formula=faster_with_more_prompts) -> Ranking:
    book = ResultCache(lambda tasks: Oracle(formula).answers(tasks, lambda: 1.0))
    book.measure(candidates, CASES)
    return ranking(book, CASES)


def test_the_fastest_that_keeps_the_limits_wins() -> None:
    assert measured(PLAIN, FASTER, BIASED).winner(LIMITS_RANKING) == FASTER
    assert measured(PLAIN, FASTER, BIASED).winner(HardLimits(0, 0.01, 1.0)) == BIASED


def test_the_simpler_of_equally_fast_candidates_wins() -> None:
    assert measured(ODD, FASTER).winner(LIMITS_RANKING) == FASTER


def test_no_candidate_within_the_limits_means_no_winner() -> None:
    assert measured(FASTER).winner(HardLimits(0, 0.01, 0.0)) is None


def test_the_frontier_trades_speed_for_bias() -> None:
    assert measured(PLAIN, ODD, FASTER, BIASED).frontier() == [BIASED, ODD, PLAIN]


def test_failed_candidates_are_not_on_the_frontier() -> None:
    def formula(task: Task) -> CaseFigures:
        return (
            CaseFigures(failed="no") if "ordering" in task.table else faster_with_more_prompts(task)
        )

    found = measured(ODD, PLAIN, formula=formula)
    assert found.candidates == [PLAIN]
    assert found.frontier() == [PLAIN]


def test_the_frontier_describes_its_members() -> None:
    found = measured(PLAIN, FASTER)
    assert found.held_out
    assert not Ranking([], (Case(8, 1),), found.book).held_out
    assert found.speed_up(FASTER, PLAIN).mean > 1.4
    assert found.figures(PLAIN).tokens_per_s == 250.0
    assert found.reference is None
    found.book.reference = PLAIN
    assert found.reference == PLAIN


def names(**items: dict[str, Any]) -> list[str]:
    return frontier(list(items), lambda name: CaseFigures(**{"tokens_per_s": 100.0, **items[name]}))


def test_slower_and_staler_is_not_on_it() -> None:
    assert names(
        fresh={"tokens_per_s": 100.0},
        fast={"tokens_per_s": 150.0, "staleness_mean": 1.0},
        beaten={"tokens_per_s": 120.0, "staleness_mean": 1.5},
    ) == ["fast", "fresh"]


def test_every_respect_counts() -> None:
    everything = {
        "best": {},
        "fast": {"tokens_per_s": 110.0, "step_bias": 0.5, "length_ratio": 0.5, "staleness_mean": 9},
        "a": {"tokens_per_s": 105.0, "step_bias": 0.5},
        "b": {"tokens_per_s": 105.0, "longest_kept": 0.5},
        "c": {"tokens_per_s": 105.0, "staleness_mean": 1.0},
    }
    assert set(names(**everything)) == set(everything)


def test_differences_too_small_to_matter_are_none() -> None:
    assert names(first={"tokens_per_s": 100.0}, same={"tokens_per_s": 100.2}) == ["first"]
    assert names(a={"step_bias": 0.101}, b={"step_bias": 0.099}) == ["a"]


def test_candidates_without_tokens_are_not_on_the_frontier() -> None:
    assert names(a={"tokens_per_s": 0.0}) == []
    assert names() == []
