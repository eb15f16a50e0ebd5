"""What of a run must outlive its scheduler: facts, not the events that led to them.

A `RunState` is all that a fresh scheduler needs to go on (see `restorer`). It holds counts and
names, no tokens and no instances: whose tokens these are the driver knows, and instances join anew.
A request in flight stands there as if its instance were lost now: with what was streamed of it, and
without its attempt. Direct requests are not in it, for whoever waited for them is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from rollout_sched.core.rounds import DeliveredGroup, Launch
from rollout_sched.core.samples import Segment

GroupStands = Literal["fresh", "active", "spent", "deferred", "judging", "complete"]
RequestStands = Literal["waiting", "parked", "acting", "finished"]


class RequestFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A request of a group; `core.model.Request` says what the fields mean.

    state            "waiting" or in flight; "parked" until its group is launched again, or the
                     round's budget renewed; "acting", with its tool; or "finished"
    segments         what is kept of it, in order
    observed_tokens  of its context, what tools have returned
    """

    index: int
    serial: int
    state: RequestStands
    segments: tuple[Segment, ...] = ()
    observed_tokens: int = 0
    computed_tokens: int = 0
    settled_tokens: int = 0
    turn: int = 0
    ends: bool = False
    finish: str = ""
    salt: int | None = None
    last_attempt: int = 0
    last_instance: str | None = None
    migrations: int = 0

    @property
    def response_tokens(self) -> int:
        return sum([segment.tokens for segment in self.segments])


class GroupFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A group that is neither delivered nor lost; `core.model.Group` says what the fields mean.

    started   whether staleness applies to it
    history   response lengths of a prompt that has no name, by delivery (`LengthHistory`)
    finished  the indices of those that have finished, in that order
    """

    group: str
    serial: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    prompt: str = ""
    expected_tokens: int = 0
    history: tuple[tuple[int, ...], ...] = ()
    state: GroupStands = "fresh"
    started: bool = False
    oldest_version: int | None = None
    launch_place: int = 0
    launch_size: int = 1
    finished: tuple[int, ...] = ()
    requests: tuple[RequestFacts, ...] = ()
    judged: bool = False

    def anew(self) -> GroupFacts:
        """The group as it was submitted."""
        return msgspec.structs.replace(
            self,
            state="fresh",
            started=False,
            oldest_version=None,
            launch_place=0,
            launch_size=1,
            finished=(),
            requests=(),
        )


class PromptFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What earlier groups of a prompt came to: response lengths by delivery (`LengthHistory`)."""

    prompt: str
    deliveries: tuple[tuple[int, ...], ...]


#: Whose place in the round another takes (`core.progress.RunProgress.group_lost`).
_OF_THE_ROUND: Final = frozenset({"active", "judging", "complete"})


class RunFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The counters of a run; most are `core.progress.RunProgress`'s.

    now           of the last event, in seconds of the run
    loads         the newest version is ours to load (`core.updater`)
    whole_at      the version that took the last whole batch
    window        groups of the selection's window that have not started
    serials       the last serial number
    attempts      the last attempt
    instances     how many are here and do not leave, or are waited for (`core.gathering`)
    most_kv_tokens  of the largest instance that was ever here
    tested, rejected  what has become of drafts (`core.verification`)
    tuned         parameters that have been changed (`core.tuning`)
    lost          groups that the round has lost, and that are not made up for yet
    """

    now: float = 0.0
    version: int = 0
    loads: bool = True
    closed: bool = False
    trainer_waiting: bool = False
    takes_parts: bool = False
    shares_gpus: bool = False
    delivered: int = 0
    batches: int = 0
    parts: int = 0
    in_batch: int = 0
    whole_at: int | None = None
    round: Launch | None = None
    window: int = 0
    serials: int = 0
    attempts: int = 0
    instances: int = 0
    most_kv_tokens: int = 0
    tested: int = 0
    rejected: int = 0
    tuned: dict[str, dict[str, int | float]] = {}
    lost: int = 0

    def after_losses(self, written: Iterable[GroupFacts], kept: Iterable[GroupFacts]) -> RunFacts:
        """Where not all groups can be gone on with as they were written. What the round has lost is
        made up for, as where a group fails or starts over. The window has lost what was its own;
        what starts over came before all that is outside of it, so it is of the window again.
        """
        in_order = sorted(written, key=lambda group: group.serial)
        of_window = [group.group for group in in_order if group.state == "fresh"][: self.window]
        fresh = {group.group for group in kept if group.state == "fresh"}
        others = {group.group for group in kept} - fresh
        in_round = {group.group for group in in_order if group.state in _OF_THE_ROUND}
        lost = 0 if self.round is None else len(in_round - others)
        launched = {group.group for group in in_order if group.state != "fresh"}
        window = len(fresh.intersection(of_window) | (fresh & launched)) if self.window else 0
        return msgspec.structs.replace(self, lost=self.lost + lost, window=window)


class RunState(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of it. Groups and prompts in any order; `recent` as in `core.roles.Progress`."""

    run: RunFacts = RunFacts()
    groups: tuple[GroupFacts, ...] = ()
    prompts: tuple[PromptFacts, ...] = ()
    recent: tuple[DeliveredGroup, ...] = ()
