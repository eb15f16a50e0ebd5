"""The state of a run, built once: roles, fleet, groups, progress, and the actions to return."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.model import DirectSiblings, LengthHistory, Sessions
from rollout_sched.core.model.request_ids import IdCounter
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.groups import Groups, SampleBuffer
from rollout_sched.core.state.progress import RunProgress
from rollout_sched.core.state.selection import SelectionWindow
from rollout_sched.core.state.waiting import FairQueue, Shares


class State:
    """The state at the start of a run; its requests are in `work.requests`.

    orders          the actions that follow from the present event, in order
    anomalies       counts, by kind, of events that cannot be true or came too late
    prompt_lengths  None if no role uses them
    """

    def __init__(self, roles: Roles, prompts_per_step: int, version: int) -> None:
        self.roles = roles
        self.orders: list[Action] = []
        self.anomalies: Counter[str] = Counter()
        self.serials = IdCounter()
        self.prompt_lengths = LengthHistory() if roles.uses_history else None
        self.shares = Shares()
        self.waiting = FairQueue(self.shares)
        self.fleet = Fleet(
            roles.routing.load,
            roles.admission.admits,
            self.shares,
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
