"""The book of measurements: every candidate in every case, measured once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import Case, Task
from rollout_sched.simulators.tune.limits import CaseFigures
from rollout_sched.simulators.tune.pairs import SpeedUp, speed_up

#: A run is given up when it takes this many times as long as the reference.
_TIMES = 2.0

#: Evaluates tasks in their order; ends early when the time is over.
Ask = Callable[[Sequence[Task]], Iterator[CaseFigures]]


class Spent(Exception):
    """The budget is used up; the book keeps what was measured before."""


class FigureBook:
    """Figures by candidate and case. `evaluations`: how many may be measured, None for no limit.

    Its content does not depend on how evaluations are spread over processes: answers come in the
    order of the tasks, and answers after the first missing one are dropped. The reference is
    measured first: a run that takes `_TIMES` as long can never win, and may never end.
    """

    def __init__(
        self, ask: Ask, reference: Candidate | None = None, evaluations: int | None = None
    ) -> None:
        self._ask = ask
        self._reference = reference
        self._left = evaluations
        self._figures: dict[tuple[str, Case], CaseFigures] = {}
        self.candidates: dict[str, Candidate] = {}

    def __len__(self) -> int:
        return len(self._figures)

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate.key in self.candidates

    def measure(self, candidates: Sequence[Candidate], cases: Sequence[Case]) -> None:
        """Measure what is not measured yet, case by case. Raises Spent if the budget ends first."""
        if self._reference is not None:
            self._measure([(self._reference, case) for case in cases])
        self._measure([(candidate, case) for case in cases for candidate in candidates])

    def _measure(self, pairs: Sequence[tuple[Candidate, Case]]) -> None:
        wanted = {
            (candidate.key, case): candidate
            for candidate, case in pairs
            if (candidate.key, case) not in self._figures
        }
        granted = list(wanted.items())[: self._left]
        tasks = [Task(one.table, case, self._give_up_s(case)) for (_, case), one in granted]
        done = 0
        for figures in self._ask(tasks) if tasks else ():
            (key, case), candidate = granted[done]
            self._figures[key, case] = figures
            self.candidates.setdefault(key, candidate)
            done += 1
            if self._left is not None:
                self._left -= 1
        if done < len(wanted):
            raise Spent

    def _give_up_s(self, case: Case) -> float:
        if self._reference is None:
            return math.inf
        known = self._figures.get((self._reference.key, case))
        return math.inf if known is None or known.failed else _TIMES * known.total_s

    def knows(self, candidate: Candidate, cases: Sequence[Case]) -> bool:
        return all((candidate.key, case) in self._figures for case in cases)

    def of(self, candidate: Candidate, cases: Sequence[Case]) -> list[CaseFigures]:
        return [self._figures[candidate.key, case] for case in cases]

    def speed_up(self, one: Candidate, other: Candidate, cases: Sequence[Case]) -> SpeedUp:
        """How much faster `one` is than `other` in these cases, pair by pair."""
        return speed_up(self.of(one, cases), self.of(other, cases))
