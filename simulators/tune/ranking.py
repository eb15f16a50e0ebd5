"""Standings: candidates measured in the same cases, and which of them wins."""

from __future__ import annotations

import msgspec

from rollout_sched.simulators.tune.book import FigureBook
from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import Case
from rollout_sched.simulators.tune.frontier import frontier
from rollout_sched.simulators.tune.limits import CaseFigures, HardLimits, together
from rollout_sched.simulators.tune.pairs import SpeedUp, simplest_of_the_best


class Ranking(msgspec.Struct, frozen=True):
    """Candidates and cases; the book has each candidate in every case."""

    candidates: list[Candidate]
    cases: tuple[Case, ...]
    book: FigureBook

    @property
    def held_out(self) -> bool:
        """Whether these cases were held out of the search."""
        return any(case.held_out for case in self.cases)

    def preset(self, name: str) -> Candidate | None:
        return next((one for one in self.candidates if one.preset == name), None)

    def figures(self, candidate: Candidate) -> CaseFigures:
        return together(self.book.of(candidate, self.cases))

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


def ranking(book: FigureBook, cases: tuple[Case, ...]) -> Ranking:
    """All candidates in the book that were measured in every case and did not fail."""
    measured = [one for one in book.candidates.values() if book.knows(one, cases)]
    sound = [one for one in measured if not together(book.of(one, cases)).failed]
    return Ranking(sound, cases, book)
