"""Tuning as a whole: search, then validation on prompts and seeds that the search has not seen.

The finalists are the best of the search, the best preset and the baselines. The winner is the
simplest finalist that keeps the limits on the held-out cases and is beaten by none by more than the
spread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.tune.candidates import BASELINES, REFERENCE, Candidate, presets
from rollout_sched.simulators.tune.evaluation import (
    Ask,
    BudgetSpent,
    Case,
    CaseFigures,
    Evaluator,
    HardLimits,
    ResultCache,
    Task,
    WorkerDied,
)
from rollout_sched.simulators.tune.search import Ranking, Rung, Search, ranking, rungs

#: How many of the search's best are validated.
FINALISTS = 4
#: One of them keeps the limits with this margin, because results differ between prompts.
_SPARE = 0.15

#: The first seed of the validation; the seeds of the search are small.
_HELD_OUT_SEED = 1001
#: The largest share of the time kept for the validation, and the margin over its estimated time.
_MAX_KEPT = 0.35
_BEYOND = 1.15

#: The reasons why a search ends.
INTERRUPTED = "interrupted"
SPENT = "the budget was used up"
EXHAUSTED = "nothing new was left to try"

#: Called after every evaluation.
Told = Callable[[], None]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured.

    steps           of the last rung and of the validation
    seconds         total time, None for no limit
    evaluations     of the search, None for no limit
    held_out_seeds  of the validation, 0 for none
    seed            of random choices: the prompts held out, and the candidates tried
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
    """The result of tuning.

    winner       keeps the limits
    finalists    what it was chosen from, on held-out cases, or on the search's if there are none
    searched     all candidates measured in the search's longest rung
    evaluations  of the search
    ended        why the search ended, in words
    """

    winner: Candidate
    finalists: Ranking
    searched: Ranking
    evaluations: int
    ended: str


class Answering(Protocol):
    """Evaluates tasks in their order until no time is left: `Workers`."""

    def answers(
        self, questions: Sequence[Task], left_s: Callable[[], float]
    ) -> Iterator[CaseFigures]: ...


def tune(
    bench: Evaluator,
    limits: HardLimits,
    plan: Plan,
    workers: Answering,
    *,
    told: Told = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Search, validate, choose.

    The search ends with the best so far at the end of the budget, on Ctrl-C, or if a worker dies;
    after Ctrl-C there is no validation. Raises CallerError if nothing measured keeps the limits.
    """
    keeper = Timekeeper(plan.seconds, clock)
    setting = bench.setting(limits.max_staleness)
    reference = next(one for one in presets(setting) if one.preset == REFERENCE)
    asking = _asking(workers, keeper, plan.validation_steps, told)
    book = ResultCache(asking, reference, plan.evaluations)
    search = Search(setting, limits, book, plan.rungs, seed=plan.seed)
    ended = _ended(search.run)
    finalists = _finalists(search, book, limits)
    validation = ResultCache(_asking(workers, keeper, 0, told), reference)
    if ended != INTERRUPTED:
        _ended(lambda: validation.measure(finalists, plan.held_out))
    cases = tuple(c for c in plan.held_out if all(validation.knows(one, [c]) for one in finalists))
    searched = _longest(book, plan.rungs)
    judged = Ranking(finalists, cases, validation) if finalists and cases else searched
    winner = judged.winner(limits)
    if winner is None:
        raise _nothing(judged, limits, plan)
    return TuningResult(winner, judged, searched, len(book), ended)


class Timekeeper:
    """The time left by the wall clock; no limit without `seconds`.

    The time of the validation is estimated from that of the evaluations so far, by their steps.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds = math.inf if seconds is None else seconds
        self._steps = 0

    def note(self, steps: int) -> None:
        """`steps` training steps have been replayed."""
        self._steps += steps

    def left_s(self, before: int) -> float:
        """The time left if `before` training steps must be replayed afterwards."""
        elapsed = self._clock() - self._began
        kept = _MAX_KEPT * self._seconds if before else 0.0
        if self._steps:
            kept = min(kept, _BEYOND * before * elapsed / self._steps)
        return self._seconds - elapsed - (kept if math.isfinite(kept) else 0.0)


def _asking(workers: Answering, keeper: Timekeeper, before: int, told: Told) -> Ask:
    """Evaluates tasks while there is time, keeping what the last `before` steps will take."""

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
    except BudgetSpent:
        return SPENT
    except KeyboardInterrupt:
        return INTERRUPTED
    except WorkerDied as error:
        return str(error)
    return EXHAUSTED


def _finalists(search: Search, book: ResultCache, limits: HardLimits) -> list[Candidate]:
    """The best of the search, the best preset, and the baselines."""
    known = book.candidates.values()
    allowed = search.best(len(known))
    sure = search.best(1, limits.tightened(_SPARE))
    best_preset = [one for one in allowed if one.preset][:1]
    baselines = [one for one in known if one.preset in BASELINES]
    chosen = [*allowed[: FINALISTS - len(sure)], *sure, *best_preset, *baselines]
    return list({one.key: one for one in chosen}.values())


def _longest(book: ResultCache, rungs: Sequence[Rung]) -> Ranking:
    """The candidates of the longest rung with any measurement."""
    rankings = [ranking(book, rung) for rung in reversed(rungs)]
    return next((one for one in rankings if one.candidates), rankings[-1])


def _nothing(judged: Ranking, limits: HardLimits, plan: Plan) -> CallerError:
    if not judged.candidates:
        return CallerError(
            "nothing was measured before the end, because one evaluation takes longer; increase "
            "--budget, or use a shorter trace"
        )
    nearest = min(judged.candidates, key=lambda one: limits.excess(judged.figures(one)))
    why = ", ".join(limits.exceeded(judged.figures(nearest)))
    return CallerError(
        f"no measured policy keeps the limits; the nearest is {nearest.name}: {why}. Relax the "
        f"limits, or increase the budget"
    )
