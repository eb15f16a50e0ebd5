"""The book of what was measured: every candidate in every case, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import Case, Task
from rollout_sched.simulators.tune.limits import Figures
from rollout_sched.simulators.tune.pairs import SpeedUp, speed_up

#: Has tasks evaluated, in their order; ends early when the time is over.
Ask = Callable[[Sequence[Task]], Iterator[Figures]]


class Spent(Exception):
    """The budget is used up; what was measured before stands in the book."""


class Book:
    """Figures by candidate and case. `evaluations`: how many may be measured, None for any number.

    What it holds does not depend on how evaluations are spread over processes: answers come in the
    order of the tasks, and those after the first that is missing are not taken.
    """

    def __init__(self, ask: Ask, evaluations: int | None = None) -> None:
        self._ask = ask
        self._left = evaluations
        self._figures: dict[tuple[str, Case], Figures] = {}
        self.candidates: dict[str, Candidate] = {}

    def __len__(self) -> int:
        return len(self._figures)

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate.key in self.candidates

    def measure(self, candidates: Sequence[Candidate], cases: Sequence[Case]) -> None:
        """Measure what is not known yet, case by case. Raises Spent if that was too much."""
        wanted = [
            (candidate, case)
            for case in cases
            for candidate in {c.key: c for c in candidates}.values()
            if (candidate.key, case) not in self._figures
        ]
        granted = wanted if self._left is None else wanted[: self._left]
        done = 0
        for figures in self._ask([Task(c.table, case) for c, case in granted]):
            candidate, case = granted[done]
            self._figures[candidate.key, case] = figures
            self.candidates.setdefault(candidate.key, candidate)
            done += 1
            if self._left is not None:
                self._left -= 1
        if done < len(wanted):
            raise Spent

    def knows(self, candidate: Candidate, cases: Sequence[Case]) -> bool:
        return all((candidate.key, case) in self._figures for case in cases)

    def of(self, candidate: Candidate, cases: Sequence[Case]) -> list[Figures]:
        return [self._figures[candidate.key, case] for case in cases]

    def speed_up(self, one: Candidate, other: Candidate, cases: Sequence[Case]) -> SpeedUp:
        """How much faster the one is than the other in these cases, pair by pair."""
        return speed_up(self.of(one, cases), self.of(other, cases))
