"""Tuning: a search by successive halving, and the validation of the best that it finds.

The search goes in brackets. A bracket measures many candidates briefly and the best quarter for
longer, rung after rung (Jamieson and Talwalkar, arXiv 1502.07943; several brackets as in Hyperband,
arXiv 1603.06560). The first has presets and draws from the space, later ones also neighbours and
crossings of the best so far. What is measured, and in which order, depends on the seed alone; a
budget only ends it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec

from rollout_sched.config import PolicyFile
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_COUNT, Count, Serial, Size
from rollout_sched.flags import Flag
from rollout_sched.simulators.tune.candidates import (
    BASELINES,
    REFERENCE,
    Candidate,
    cross,
    draw,
    neighbour,
    presets,
    roles_of,
    starts,
)
from rollout_sched.simulators.tune.evaluation import (
    Ask,
    BudgetSpent,
    Case,
    CaseFigures,
    Evaluator,
    HardLimits,
    ResultCache,
    SpeedUp,
    Task,
    simplest_of_the_best,
    together,
)
from rollout_sched.simulators.tune.space import Setting
from rollout_sched.workers import WorkerDied, WorkerPool

# ------------------------------------------------------------------------------------------
# The frontier: candidates that no other beats in speed, staleness and bias at once.

Item = TypeVar("Item")


def frontier(items: Sequence[Item], figures: Callable[[Item], CaseFigures]) -> list[Item]:
    """The items than which no other is as good in every respect and better in one, fastest first.

    Respects: speed, mean staleness, length bias, step bias; each rounded to what matters (1 %, 0.1
    versions, 0.01), because chance would else put nearly all on the frontier. Of equal items only
    the first is kept.
    """
    respects = {id(item): _respects(figures(item)) for item in items}
    kept: dict[tuple[int, ...], Item] = {}
    for item in items:
        mine = respects[id(item)]
        others = (respects[id(other)] for other in items)
        if mine[0] > _NO_SPEED and not any(_dominates(theirs, mine) for theirs in others):
            kept.setdefault(mine, item)
    return [kept[mine] for mine in sorted(kept, reverse=True)]


_NO_SPEED = -(10**9)


def _respects(figures: CaseFigures) -> tuple[int, ...]:
    """Integers of which more is better."""
    speed = round(100 * math.log(figures.tokens_per_s)) if figures.tokens_per_s else _NO_SPEED
    return (
        speed,
        -round(10 * figures.staleness_mean),
        -round(100 * figures.length_bias),
        -round(100 * figures.step_bias),
    )


def _dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))


#: New candidates of a bracket, besides the presets of the first and the parents of the others.
_NEW = 24
#: Of these, how many are drawn from the whole space instead of near known candidates.
_DRAWN = 8
#: One of this many goes on to the next rung.
_GOES_ON = 4
#: This many more go on for other strengths than speed: less stale, less biased.
_FOR_THE_FRONTIER = 1
#: How many presets go on whatever others can do, and are validated.
_PRESETS = 4
#: How many of the best candidates have children.
_PARENTS = 5
#: How many further parents would be best without a limit.
_BEYOND = 2
#: Draws without a new candidate until the space counts as exhausted.
_TRIES = 300

Rung = tuple[Case, ...]


def steps_for(max_staleness: int) -> int:
    """Steps of the last rung: 24, or four times as many as an async run needs to become steady."""
    return max(24, 4 * (max_staleness + 1))


def rungs(steps: int) -> list[Rung]:
    """The cases of each rung: a third of the steps on one seed, two thirds on two, all on two."""
    lengths = (max(1, steps // 3), max(1, 2 * steps // 3), steps)
    return [
        tuple(Case(length, seed) for seed in range(1, count + 1))
        for length, count in zip(lengths, (1, 2, 2), strict=True)
    ]


class Search:
    """Measurements go to `book`; `rungs` as above, `seed` is that of the draws."""

    def __init__(
        self,
        setting: Setting,
        limits: HardLimits,
        book: ResultCache,
        rungs: Sequence[Rung],
        *,
        seed: int = 0,
    ) -> None:
        self._setting = setting
        self._limits = limits
        self._book = book
        self._rungs = rungs
        self._rng = random.Random(f"{seed}/candidates")
        reference = [] if book.reference is None else [book.reference]
        self._presets = list({one.preset: one for one in (*presets(setting), *reference)}.values())

    def run(self) -> None:
        """Run until the space is exhausted. Raises BudgetSpent, or what interrupts a
        measurement."""
        parents = [*self._presets, *starts(self._setting, self._rng)]
        while new := self._generation(parents):
            self._bracket([*parents, *new])
            parents = [*self.best(_PARENTS), *self._beyond(_BEYOND)]

    def best(self, count: int, limits: HardLimits | None = None) -> list[Candidate]:
        """The fastest that keep the limits in all measurements, those measured longest first.

        `limits`: if other than the search's.
        """
        known = list(self._book.candidates.values())
        found: list[Candidate] = []
        for rung in reversed(self._rungs):
            here = [one for one in known if self._book.knows(one, rung)]
            known = [one for one in known if one not in here]
            ranked = self._rank(here, rung)
            found += [one for one in ranked if self._allowed(one, rung, limits)]
        return found[:count]

    def _beyond(self, count: int) -> list[Candidate]:
        """The fastest that exceed a limit, because their neighbours may keep it."""
        known = list(self._book.candidates.values())
        ranked = self._rank(known, self._rungs[0])
        return [one for one in ranked if not self._allowed(one, self._rungs[0])][:count]

    # -- a bracket -------------------------------------------------------------------------------

    def _bracket(self, pool: Sequence[Candidate]) -> None:
        for rung in self._rungs:
            self._book.measure(pool, rung)
            pool = self._going_on(pool, rung)

    def _going_on(self, pool: Sequence[Candidate], rung: Rung) -> list[Candidate]:
        """The fastest, and also the frontier, the best presets and the reference."""
        ranked = self._rank(pool, rung)
        on = ranked[: math.ceil(len(pool) / _GOES_ON)]
        others = frontier(ranked, lambda candidate: self._figures(candidate, rung))
        on += [one for one in others if one not in on][:_FOR_THE_FRONTIER]
        on += [one for one in ranked if one.preset and self._allowed(one, rung)][:_PRESETS]
        on += [one for one in pool if one == self._book.reference]
        return list({one.key: one for one in on}.values())

    def _rank(self, pool: Sequence[Candidate], rung: Rung) -> list[Candidate]:
        """The candidates measured in the whole rung: those that keep the limits first, then by
        speed.

        Of those with identical results only the simplest: their differences have no effect.
        """
        alike: dict[CaseFigures, list[Candidate]] = {}
        for one in pool:
            if self._book.knows(one, rung) and not self._figures(one, rung).failed:
                alike.setdefault(self._figures(one, rung), []).append(one)
        kept = [min(same, key=lambda one: one.departures) for same in alike.values()]
        return sorted(kept, key=lambda one: (not self._allowed(one, rung), -self._speed(one, rung)))

    def _speed(self, candidate: Candidate, rung: Rung) -> float:
        """A mean of logarithms, so that all cases have equal weight."""
        return sum(math.log(one.tokens_per_s) for one in self._book.figures_of(candidate, rung))

    def _allowed(self, candidate: Candidate, rung: Rung, limits: HardLimits | None = None) -> bool:
        figures = self._figures(candidate, rung)
        return not (limits or self._limits).exceeded(figures)

    def _figures(self, candidate: Candidate, rung: Rung) -> CaseFigures:
        return together(self._book.figures_of(candidate, rung))

    # -- new candidates --------------------------------------------------------------------------

    def _generation(self, parents: Sequence[Candidate]) -> list[Candidate]:
        """New candidates: most near the parents if there are any, the others drawn."""
        near = _NEW - _DRAWN if parents else 0
        children = self._new(near, lambda: self._child(parents))
        return [*children, *self._new(_NEW - near, self._draw, children)]

    def _draw(self) -> Candidate:
        return draw(self._setting, self._rng)

    def _child(self, parents: Sequence[Candidate]) -> Candidate:
        parent = self._rng.choice(parents)
        if len(parents) > 1 and self._rng.random() < 0.25:
            return cross(parent, self._rng.choice(parents), self._setting, self._rng)
        return neighbour(parent, self._setting, self._rng)

    def _new(
        self, count: int, make: Callable[[], Candidate], besides: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """`count` candidates that did not exist before; fewer if the space is small."""
        taken = {one.key for one in (*besides, *self._presets)}
        found: list[Candidate] = []
        for _ in range(_TRIES):
            if len(found) == count:
                break
            candidate = make()
            if candidate.key not in taken and candidate not in self._book:
                taken.add(candidate.key)
                found.append(candidate)
        return found


class Ranking(msgspec.Struct, frozen=True):
    """Candidates and cases; the book has each candidate in every case."""

    candidates: list[Candidate]
    cases: tuple[Case, ...]
    book: ResultCache

    @property
    def held_out(self) -> bool:
        """Whether these cases were held out of the search."""
        return any(case.held_out for case in self.cases)

    @property
    def reference(self) -> Candidate | None:
        """None if it is not among them."""
        return next((one for one in self.candidates if one == self.book.reference), None)

    def figures(self, candidate: Candidate) -> CaseFigures:
        return together(self.book.figures_of(candidate, self.cases))

    def speed_up(self, one: Candidate, other: Candidate) -> SpeedUp:
        """How much faster `one` is than `other`, pair by pair."""
        return self.book.speed_up(one, other, self.cases)

    def winner(self, limits: HardLimits) -> Candidate | None:
        """The simplest that keeps the limits and is beaten by none by more than the spread."""
        allowed = [one for one in self.candidates if not limits.exceeded(self.figures(one))]
        if not allowed:
            return None
        return simplest_of_the_best(allowed, self.speed_up, lambda one: one.departures)

    def frontier(self) -> list[Candidate]:
        """The candidates that none beats in speed, staleness and bias at once, fastest first."""
        sound = [one for one in self.candidates if not self.figures(one).failed]
        return frontier(sound, self.figures)


def ranking(book: ResultCache, cases: tuple[Case, ...]) -> Ranking:
    """All candidates in the book that were measured in every case and did not fail."""
    measured = [one for one in book.candidates.values() if book.knows(one, cases)]
    sound = [one for one in measured if not together(book.figures_of(one, cases)).failed]
    return Ranking(sound, cases, book)


# ------------------------------------------------------------------------------------------
# Tuning: search, then validation on prompts and seeds that the search has not seen.
#
# The finalists are the best of the search, the best presets and the baselines. The winner is the
# simplest finalist that keeps the limits on the held-out cases and is beaten by none by more than
# the spread.

#: How many of the search's best are validated.
FINALISTS = 4
#: One of them keeps the limits with this margin, because results differ between prompts.
_SPARE = 0.15

#: The first seed of the validation; the seeds of the search are small.
_HELD_OUT_SEED = 1001
#: The largest share of the time kept for the validation, and the margin over its estimated time.
_MAX_KEPT = 0.35
_MARGIN = 1.15

#: The reasons why a search ends.
INTERRUPTED = "interrupted"
SPENT = "the budget was used up"
EXHAUSTED = "nothing new was left to try"

#: Called after every evaluation.
Told = Callable[[], None]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured.

    steps           of the last rung and of the validation
    seconds         total time (default: 120, unless the evaluations are limited)
    evaluations     number of evaluations, without a time limit: the same number gives the same file
    held_out_seeds  seeds to validate on, 0 for no validation
    seed            of all random choices: the prompts held out, and the candidates tried
    """

    steps: Count
    seconds: Annotated[Annotated[float, msgspec.Meta(gt=0)] | None, Flag("--budget", "SECONDS")] = (
        None
    )
    evaluations: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] | None = None
    held_out_seeds: Size = 5
    seed: Serial = 0

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
        return len(self.held_out) * self.steps * (FINALISTS + _PRESETS + len(BASELINES))


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


Workers = WorkerPool[Task, CaseFigures]


def tune(
    bench: Evaluator,
    limits: HardLimits,
    plan: Plan,
    workers: Workers,
    *,
    in_use: PolicyFile | None = None,
    told: Told = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningResult:
    """Search, validate, choose. Speed-ups are over the policy `in_use`, if there is one.

    The search ends with the best so far at the end of the budget, on Ctrl-C, or if a worker dies;
    after Ctrl-C there is no validation. Raises CallerError if nothing measured keeps the limits.
    """
    keeper = Timekeeper(plan.seconds, clock)
    setting = bench.setting(limits.max_staleness)
    reference = next(one for one in presets(setting) if one.preset == REFERENCE)
    if in_use is not None:
        reference = Candidate(roles_of(in_use.tables), in_use.name)
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
            kept = min(kept, _MARGIN * before * elapsed / self._steps)
        return self._seconds - elapsed - (kept if math.isfinite(kept) else 0.0)


def _asking(workers: Workers, keeper: Timekeeper, before: int, told: Told) -> Ask:
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
    """The best of the search, the best presets, and the baselines."""
    known = book.candidates.values()
    allowed = search.best(len(known))
    sure = search.best(1, limits.tightened(_SPARE))
    best_presets = [one for one in allowed if one.preset][:_PRESETS]
    baselines = [one for one in known if one.preset in BASELINES or one == book.reference]
    chosen = [*allowed[: FINALISTS - len(sure)], *sure, *best_presets, *baselines]
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
