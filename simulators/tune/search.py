"""The search: successive halving, bracket after bracket, from presets and draws to what is near.

A bracket measures many candidates briefly and the better quarter for longer, rung after rung
(Jamieson and Talwalkar, arXiv 1502.07943; bracket after bracket as in Hyperband, arXiv 1603.06560).
The first holds presets and draws from the space, later ones also neighbours and crossings of the
best so far. What is measured, and when, depends on the seed alone; a budget only ends it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from rollout_sched.simulators.tune.book import FigureBook
from rollout_sched.simulators.tune.candidates import (
    REFERENCE,
    Candidate,
    cross,
    draw,
    neighbour,
    presets,
    starts,
)
from rollout_sched.simulators.tune.evaluation import Case
from rollout_sched.simulators.tune.frontier import frontier
from rollout_sched.simulators.tune.limits import CaseFigures, HardLimits, together
from rollout_sched.simulators.tune.space import Setting

#: New candidates of a bracket, beside the presets of the first and the parents of the others.
_NEW = 24
#: Of these, what is drawn from the whole space and not near what is known.
_DRAWN = 8
#: One in so many goes on to the next rung.
_GOES_ON = 4
#: So many more go on for what they are beside fast: less stale, less biased.
_FOR_THE_FRONTIER = 1
#: How many of the best have children.
_PARENTS = 5
#: And how many of those that would be best but for a limit.
_BEYOND = 2
#: Draws that bring nothing new before the space counts as exhausted.
_TRIES = 300

Rung = tuple[Case, ...]


def steps_for(max_staleness: int) -> int:
    """Steps of the last rung: 24, or four times as many as an async run takes to become steady."""
    return max(24, 4 * (max_staleness + 1))


def rungs(steps: int) -> list[Rung]:
    """The cases of every rung: a third of the steps on one seed, two thirds on two, all on two."""
    lengths = (max(1, steps // 3), max(1, 2 * steps // 3), steps)
    return [
        tuple(Case(length, seed) for seed in range(1, count + 1))
        for length, count in zip(lengths, (1, 2, 2), strict=True)
    ]


class Search:
    """All that was measured stands in `book`; `rungs` as above, `seed` that of the draws."""

    def __init__(
        self,
        setting: Setting,
        limits: HardLimits,
        book: FigureBook,
        rungs: Sequence[Rung],
        *,
        seed: int = 0,
    ) -> None:
        self._setting = setting
        self._limits = limits
        self._book = book
        self._rungs = rungs
        self._dice = random.Random(f"{seed}/candidates")
        self._presets = presets(setting)

    def run(self) -> None:
        """Until the space is exhausted. Raises Spent, or whatever interrupts a measurement."""
        parents = [*self._presets, *starts(self._setting, self._dice)]
        while new := self._generation(parents):
            self._bracket([*parents, *new])
            parents = [*self.best(_PARENTS), *self._beyond(_BEYOND)]

    def best(self, count: int, limits: HardLimits | None = None) -> list[Candidate]:
        """The fastest that keep the limits as far as was measured, those measured longest first.

        `limits`: other than the search's.
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
        """The fastest that exceed a limit: what is near them may not."""
        known = list(self._book.candidates.values())
        ranked = self._rank(known, self._rungs[0])
        return [one for one in ranked if not self._allowed(one, self._rungs[0])][:count]

    # -- a bracket -------------------------------------------------------------------------------

    def _bracket(self, pool: Sequence[Candidate]) -> None:
        for rung in self._rungs:
            self._book.measure(pool, rung)
            pool = self._going_on(pool, rung)

    def _going_on(self, pool: Sequence[Candidate], rung: Rung) -> list[Candidate]:
        """The fastest, and beside them what is on the frontier, the best preset, the reference."""
        ranked = self._rank(pool, rung)
        on = ranked[: math.ceil(len(pool) / _GOES_ON)]
        others = frontier(ranked, lambda candidate: self._figures(candidate, rung))
        on += [one for one in others if one not in on][:_FOR_THE_FRONTIER]
        on += [one for one in ranked if one.preset and self._allowed(one, rung)][:1]
        on += [one for one in pool if one.preset == REFERENCE]
        return list({one.key: one for one in on}.values())

    def _rank(self, pool: Sequence[Candidate], rung: Rung) -> list[Candidate]:
        """Those measured in the whole rung: what keeps the limits first, then by speed.

        Of those that did exactly the same only the simplest: what sets them apart does nothing.
        """
        alike: dict[CaseFigures, list[Candidate]] = {}
        for one in pool:
            if self._book.knows(one, rung) and not self._figures(one, rung).failed:
                alike.setdefault(self._figures(one, rung), []).append(one)
        kept = [min(same, key=lambda one: one.departures) for same in alike.values()]
        return sorted(kept, key=lambda one: (not self._allowed(one, rung), -self._speed(one, rung)))

    def _speed(self, candidate: Candidate, rung: Rung) -> float:
        """A mean of logarithms, so that every case counts alike."""
        return sum(math.log(one.tokens_per_s) for one in self._book.of(candidate, rung))

    def _allowed(self, candidate: Candidate, rung: Rung, limits: HardLimits | None = None) -> bool:
        figures = self._figures(candidate, rung)
        return not (limits or self._limits).exceeded(figures)

    def _figures(self, candidate: Candidate, rung: Rung) -> CaseFigures:
        return together(self._book.of(candidate, rung))

    # -- new candidates --------------------------------------------------------------------------

    def _generation(self, parents: Sequence[Candidate]) -> list[Candidate]:
        """New candidates: most near the parents where there are any, the others drawn."""
        near = _NEW - _DRAWN if parents else 0
        children = self._new(near, lambda: self._child(parents))
        return [*children, *self._new(_NEW - near, self._draw, children)]

    def _draw(self) -> Candidate:
        return draw(self._setting, self._dice)

    def _child(self, parents: Sequence[Candidate]) -> Candidate:
        parent = self._dice.choice(parents)
        if len(parents) > 1 and self._dice.random() < 0.25:
            return cross(parent, self._dice.choice(parents), self._setting, self._dice)
        return neighbour(parent, self._setting, self._dice)

    def _new(
        self, count: int, make: Callable[[], Candidate], besides: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """So many that were not there before; fewer where the space is small."""
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
