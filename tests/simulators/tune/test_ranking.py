"""Standings: who wins, and what is on the frontier."""

from __future__ import annotations

from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import Case, CaseFigures, FigureBook, HardLimits, Task
from rollout_sched.simulators.tune.search import Ranking, ranking
from tests.simulators.tune.bench import Oracle, candidate, faster_with_more_prompts

CASES = (Case(8, 1, held_out=True), Case(8, 2, held_out=True))
LIMITS = HardLimits(0, 0.01, 0.051)
PLAIN, FASTER, BIASED = (candidate(batching="sync", over_prompts=over) for over in (1.0, 1.5, 2.0))
ODD = candidate(batching="sync", over_prompts=1.5, ordering="shortest_first")


def measured(*candidates: Candidate, formula=faster_with_more_prompts) -> Ranking:
    book = FigureBook(lambda tasks: Oracle(formula).answers(tasks, lambda: 1.0))
    book.measure(candidates, CASES)
    return ranking(book, CASES)


def test_the_fastest_that_keeps_the_limits_wins() -> None:
    assert measured(PLAIN, FASTER, BIASED).winner(LIMITS) == FASTER
    assert measured(PLAIN, FASTER, BIASED).winner(HardLimits(0, 0.01, 1.0)) == BIASED


def test_of_equally_fast_ones_the_simpler() -> None:
    assert measured(ODD, FASTER).winner(LIMITS) == FASTER


def test_nothing_wins_where_nothing_keeps_the_limits() -> None:
    assert measured(FASTER).winner(HardLimits(0, 0.01, 0.0)) is None


def test_the_frontier_trades_speed_for_bias() -> None:
    assert measured(PLAIN, ODD, FASTER, BIASED).frontier() == [BIASED, ODD, PLAIN]


def test_what_failed_is_not_there() -> None:
    def formula(task: Task) -> CaseFigures:
        return (
            CaseFigures(failed="no") if "ordering" in task.table else faster_with_more_prompts(task)
        )

    found = measured(ODD, PLAIN, formula=formula)
    assert found.candidates == [PLAIN]
    assert found.frontier() == [PLAIN]


def test_what_it_says_of_its_members() -> None:
    found = measured(PLAIN, FASTER)
    assert found.held_out
    assert not Ranking([], (Case(8, 1),), found.book).held_out
    assert found.speed_up(FASTER, PLAIN).mean > 1.4
    assert found.figures(PLAIN).tokens_per_s == 250.0
    assert found.preset("dplb") is None
    known = Candidate({}, "dplb")
    assert Ranking([PLAIN, known], CASES, found.book).preset("dplb") == known
