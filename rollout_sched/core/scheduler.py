"""The scheduler: events in, actions out. All decisions are made here.

`handle` checks one event (`validation`), applies it (`event_table`), and then lets the roles decide
(`decider`). It uses no clock, no coroutine, no randomness and no I/O.
"""

from __future__ import annotations

from rollout_sched.core import events as ev
from rollout_sched.core import invariants
from rollout_sched.core.actions import Action
from rollout_sched.core.books import Books
from rollout_sched.core.decider import Decider
from rollout_sched.core.errors import CallerError
from rollout_sched.core.event_table import event_table
from rollout_sched.core.roles import Roles
from rollout_sched.core.tuning import Tuning
from rollout_sched.core.validation import CHECKS
from rollout_sched.core.view import SchedulerView
from rollout_sched.core.work import Work


class Scheduler:
    """Rollout scheduling for one trainer and one fleet.

    `prompts_per_step`: groups in a batch. `version`: the trainer's version at the start.
    `max_failures`: if a request fails this often in a row, its group is lost. `backoff_s`: how long
    a request rests before it is tried again, or an instance that is at fault before it gets more
    work; doubled for each time in a row, up to 64 times.

    Events that come too late change nothing; impossible token counts and versions are replaced by
    the nearest possible ones. `view.anomalies` counts both, by kind.
    """

    def __init__(
        self,
        roles: Roles,
        prompts_per_step: int,
        *,
        version: int = 0,
        max_failures: int = 5,
        backoff_s: float = 1.0,
    ) -> None:
        if prompts_per_step < 1:
            raise CallerError(f"prompts_per_step must be at least 1, not {prompts_per_step}")
        out: list[Action] = []
        self.roles = roles
        self.books = books = Books(roles, prompts_per_step, version)
        self.work = work = Work(roles, books, max_failures, backoff_s, out)
        self.decider = decider = Decider(roles, books, work, out)
        tuning = Tuning(roles, decider.migrator, decider.lender, books.selection_window)
        self.view = SchedulerView(roles, books, work, decider.updater, tuning)
        self._apply = event_table(roles, books, work, decider, tuning, out)
        self._out = out

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Apply `event`, which happened at `now` (seconds), and return the resulting actions.

        Raises CallerError, with nothing changed, if the caller asked for the impossible.
        """
        kind = type(event)
        if kind in CHECKS:
            CHECKS[kind](self, event)
        self._apply[kind](event, now)
        self.decider.decide(now)
        out = self._out
        actions = out[:]
        out.clear()
        return actions

    def check_invariants(self) -> None:
        """Raise AssertionError, with the reason, if the books do not add up."""
        invariants.check(self)
