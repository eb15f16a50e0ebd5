"""Tuning as a whole: search, then validation on prompts and seeds the search has not seen.

The finalists are the best of the search, the best preset and the baselines. Of those that keep the
limits on what was held out the simplest wins that none beats by more than the spread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.tune.book import Ask, FigureBook, Spent
from rollout_sched.simulators.tune.candidates import BASELINES, REFERENCE, Candidate, presets
from rollout_sched.simulators.tune.evaluation import Bench, Case, Task
from rollout_sched.simulators.tune.limits import CaseFigures, HardLimits
from rollout_sched.simulators.tune.search import Rung, Search, rungs
from rollout_sched.simulators.tune.standing import Standing, standing
from rollout_sched.simulators.tune.workers import WorkerDied

#: Of the search's best, how many are validated.
FINALISTS = 4
#: One of them keeps the limits with so much to spare, for prompts differ in what they show.
_SPARE = 0.15

#: The first seed of the validation; those of the search are small.
_HELD_OUT_SEED = 1001
#: The most of the time that is kept for the validation, and what it may cost beyond the estimate.
_MOST_KEPT = 0.35
_BEYOND = 1.15

#: Why a search ended.
INTERRUPTED = "interrupted"
SPENT = "the budget was used up"
EXHAUSTED = "nothing new was left to try"

#: Told of every evaluation when it is done.
Told = Callable[[], None]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured.

    steps           of the last rung and of the validation
    seconds         for all of it, None for any time
    evaluations     of the search, None for any number
    held_out_seeds  of the validation, 0 for none
    seed            of what is drawn: which prompts are held out, which candidates are tried
    """

    steps: int
    seconds: float | None = None
    evaluations: int | None = None
    held_out_seeds: int = 5
    seed: int = 0

    @property
    def rungs(self) -> list[Rung]:
        return rungs(self.steps)

    @property
    def held_out(self) -> Rung:
        seeds = range(_HELD_OUT_SEED, _HELD_OUT_SEED + self.held_out_seeds)
        return tuple(Case(self.steps, seed, held_out=True) for seed in seeds)

    @property
    def validation_steps(self) -> int:
        """Training steps that the validation will replay, at most."""
        return len(self.held_out) * self.steps * (FINALISTS + 1 + len(BASELINES))


class TuningResult(msgspec.Struct, frozen=True):
    """What tuning found.

    winner       keeps the limits
    finalists    what it was chosen from, on held-out cases; on the search's where there are none
    searched     all that were measured in the search's longest rung
    evaluations  of the search
    ended        why the search ended, in words
    """

    winner: Candidate
    finalists: Standing
    searched: Standing
    evaluations: int
    ended: str


class Answering(Protocol):
    """What has tasks evaluated, in their order, until no time is left: `Workers`."""

    def answers(
        self, questions: Sequence[Task], left_s: Callable[[], float]
    ) -> Iterator[CaseFigures]: ...


def tune(
    bench: Bench,
    limits: HardLimits,
    plan: Plan,
    workers: Answering,
    *,
    told: Told = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Search, validate, choose.

    The budget, the keyboard or a worker that dies end the search with the best so far; from the
    keyboard, nothing more is validated. Raises CallerError if nothing measured keeps the limits.
    """
    keeper = Timekeeper(plan.seconds, clock)
    setting = bench.setting(limits.max_staleness)
    reference = next(one for one in presets(setting) if one.preset == REFERENCE)
    asking = _asking(workers, keeper, plan.validation_steps, told)
    book = FigureBook(asking, reference, plan.evaluations)
    search = Search(setting, limits, book, plan.rungs, seed=plan.seed)
    ended = _ended(search.run)
    finalists = _finalists(search, book, limits)
    validation = FigureBook(_asking(workers, keeper, 0, told), reference)
    if ended != INTERRUPTED:
        _ended(lambda: validation.measure(finalists, plan.held_out))
    cases = tuple(c for c in plan.held_out if all(validation.knows(one, [c]) for one in finalists))
    searched = _longest(book, plan.rungs)
    judged = Standing(finalists, cases, validation) if finalists and cases else searched
    winner = judged.winner(limits)
    if winner is None:
        raise _nothing(judged, limits, plan)
    return TuningResult(winner, judged, searched, len(book), ended)


class Timekeeper:
    """The time that is left, by the clock on the wall; for ever without `seconds`.

    What the validation will take is known from what evaluations took so far, by their steps.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = math.inf if seconds is None else seconds
        self._steps = 0

    def note(self, steps: int) -> None:
        """So many training steps have been replayed."""
        self._steps += steps

    def left_s(self, before: int) -> float:
        """What is left if so many training steps are still to be replayed afterwards."""
        elapsed = self._clock() - self._began
        kept = _MOST_KEPT * self._seconds if before else 0.0
        if self._steps:
            kept = min(kept, _BEYOND * before * elapsed / self._steps)
        return self._seconds - elapsed - (kept if math.isfinite(kept) else 0.0)


def _asking(workers: Answering, keeper: Timekeeper, before: int, told: Told) -> Ask:
    """Has tasks evaluated while there is time, beside what the steps `before` the end will take."""

    def ask(tasks: Sequence[Task]) -> Iterator[CaseFigures]:
        answers = workers.answers(tasks, lambda: keeper.left_s(before))
        for task, answer in zip(tasks, answers, strict=False):
            keeper.note(task.case.steps)
            told()
            yield answer

    return ask


def _ended(measuring: Callable[[], None]) -> str:
    try:
        measuring()
    except Spent:
        return SPENT
    except KeyboardInterrupt:
        return INTERRUPTED
    except WorkerDied as error:
        return str(error)
    return EXHAUSTED


def _finalists(search: Search, book: FigureBook, limits: HardLimits) -> list[Candidate]:
    """The best of the search, the best preset, and the baselines."""
    known = book.candidates.values()
    allowed = search.best(len(known))
    sure = search.best(1, limits.tightened(_SPARE))
    best_preset = [one for one in allowed if one.preset][:1]
    baselines = [one for one in known if one.preset in BASELINES]
    chosen = [*allowed[: FINALISTS - len(sure)], *sure, *best_preset, *baselines]
    return list({one.key: one for one in chosen}.values())


def _longest(book: FigureBook, rungs: Sequence[Rung]) -> Standing:
    """Those of the longest rung that anything was measured in."""
    standings = [standing(book, rung) for rung in reversed(rungs)]
    return next((one for one in standings if one.candidates), standings[-1])


def _nothing(judged: Standing, limits: HardLimits, plan: Plan) -> CallerError:
    if not judged.candidates:
        return CallerError(
            "nothing was measured before the end; one evaluation takes longer than that, so give "
            "more time by --budget, or a shorter trace"
        )
    nearest = min(judged.candidates, key=lambda one: limits.excess(judged.figures(one)))
    why = ", ".join(limits.exceeded(judged.figures(nearest)))
    return CallerError(
        f"no policy that was measured keeps the limits; the nearest is {nearest.name}: {why}. "
        f"Allow so much, or give more time"
    )
