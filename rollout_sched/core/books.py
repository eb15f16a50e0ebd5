"""The books of a run: all state of a scheduler except its requests (see `work`)."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.fleet import Fleet
from rollout_sched.core.groups import Groups
from rollout_sched.core.length_history import LengthHistory
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.selection_window import SelectionWindow
from rollout_sched.core.serials import Serials
from rollout_sched.core.sessions import Sessions
from rollout_sched.core.siblings import DirectSiblings


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
            counts_finished=roles.counts_finished,
        )
        self.groups = Groups()
        self.sample_buffer = SampleBuffer()
        self.progress = RunProgress(
            prompts_per_step,
            version,
            self.fleet,
            self.groups,
            self.sample_buffer,
            keeps_recent=getattr(roles.batching, "uses_recent", False),
        )
        self.selection_window = SelectionWindow(roles.selection, self.groups, prompts_per_step)
        self.sessions = Sessions()
        self.siblings = DirectSiblings()
