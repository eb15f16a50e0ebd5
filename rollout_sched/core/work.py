"""Work: the current requests, and the parts that move them and their groups."""

from __future__ import annotations

from rollout_sched.core.actions import Action
from rollout_sched.core.attempts import AttemptLedger
from rollout_sched.core.backoff import Backoff
from rollout_sched.core.books import Books
from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.group_outcomes import GroupOutcomes
from rollout_sched.core.outcomes import Outcomes
from rollout_sched.core.requests import Requests
from rollout_sched.core.roles import Roles
from rollout_sched.core.verification import Verification


class Work:
    """These parts, on top of the books of a run. They append actions to `out`."""

    def __init__(
        self, roles: Roles, books: Books, max_failures: int, backoff_s: float, out: list[Action]
    ) -> None:
        fleet, samples, progress = books.fleet, books.sample_buffer, books.progress
        self.backoff = Backoff(backoff_s, out)
        self.ledger = AttemptLedger(fleet, samples, books.anomalies, out)
        self.requests = requests = Requests(roles, fleet, self.ledger, books.serials, out)
        self.verification = Verification(roles.verifies, fleet, samples, books.anomalies, out)
        self.finished = finished = FinishedSamples(roles, progress, books.serials, out)
        self.group_outcomes = GroupOutcomes(
            roles, books.groups, requests, samples, finished, self.verification, progress
        )
        self.outcomes = Outcomes(
            self.group_outcomes,
            fleet,
            requests,
            books.siblings,
            finished,
            self.verification,
            max_failures,
            out,
        )
