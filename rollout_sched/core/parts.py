"""The books of a run: all state of a scheduler except its requests (see `work`)."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.model import DirectSiblings, LengthHistory, Serials, Sessions
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.groups import Groups, SampleBuffer
from rollout_sched.core.state.progress import RunProgress
from rollout_sched.core.state.selection import SelectionWindow
from rollout_sched.core.work.attempts import AttemptLedger, Backoff
from rollout_sched.core.work.outcomes import FinishedSamples, GroupOutcomes, Outcomes
from rollout_sched.core.work.requests import Requests


class Books:
    """The books at the start of a run.

    anomalies       counts, by kind, of events that cannot be true or came too late
    prompt_lengths  None if no role uses them
    """

    def __init__(self, roles: Roles, prompts_per_step: int, version: int) -> None:
        self.anomalies: Counter[str] = Counter()
        self.serials = Serials()
        self.prompt_lengths = LengthHistory() if roles.uses_history else None
        self.fleet = Fleet(
            roles.routing.load,
            roles.admission.admits,
            roles.sessions,
            counts_finished=roles.admission.counts_finished,
        )
        self.groups = Groups()
        self.sample_buffer = SampleBuffer()
        self.progress = RunProgress(
            prompts_per_step,
            version,
            self.fleet,
            self.groups,
            self.sample_buffer,
            keeps_recent=roles.batching.uses_recent,
        )
        self.selection_window = SelectionWindow(roles.selection, self.groups, prompts_per_step)
        self.sessions = Sessions()
        self.siblings = DirectSiblings()


# ------------------------------------------------------------------------------------------
# Work: the current requests, and the parts that move them and their groups.


class Work:
    """The parts that move requests and groups, on top of the books of a run. They append actions to
    `out`."""

    def __init__(
        self, roles: Roles, books: Books, max_failures: int, backoff_s: float, out: list[Action]
    ) -> None:
        fleet, samples, progress = books.fleet, books.sample_buffer, books.progress
        self.backoff = Backoff(backoff_s, out)
        self.ledger = AttemptLedger(fleet, samples, books.anomalies, out)
        self.requests = requests = Requests(roles, fleet, self.ledger, books.serials, out)
        self.finished = finished = FinishedSamples(roles, progress, books.serials, out)
        self.group_outcomes = GroupOutcomes(
            roles, books.groups, requests, samples, finished, progress
        )
        self.outcomes = Outcomes(
            self.group_outcomes,
            fleet,
            requests,
            books.siblings,
            finished,
            max_failures,
            out,
        )
