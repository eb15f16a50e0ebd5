"""Segments and samples, as handed out. Frozen, compared by value, and they survive JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

# The numbers of events, records and orders, checked where they are decoded: in journals, links and
# stores, which strangers and failing disks write. A new field has one of these types.

MAX_SIZE: Final = 65_536
MAX_COUNT: Final = 2**31 - 1
MAX_SERIAL: Final = 2**53 - 1  # exact as a float, in every reader of JSON

#: Of what clients share (slots, KV caches, responses that may be open) one part in so many is kept
#: for those that hold little.
ONE_IN: Final = 16

#: What lists and loops are sized by: samples of a group, groups and parts of a batch.
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
#: By what such a number is multiplied.
Times = Annotated[float, msgspec.Meta(ge=1, le=64)]
#: Tokens, and whatever else has at most 31 bits. Nothing is sized by it.
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
#: Versions, identifiers, and counters that grow with time. Nothing is sized by it.
Serial = Annotated[int, msgspec.Meta(ge=0, le=MAX_SERIAL)]
#: Seeds and priorities, as in vLLM.
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one request made under one version on one instance.

    `masked`: the tokens are too old to be trained, and serve only as context for the others.
    """

    version: Serial
    tokens: Count
    instance: str
    masked: bool = False


class DeliveredSample(msgspec.Struct, frozen=True, gc=False):
    """A finished request as the trainer receives it.

    `staleness` is the trainer's version at delivery minus the oldest version in the `segments` that
    are trained. `masked_tokens` of the response are not trained. `finish` is "stop" or "length";
    of a direct request also "abort".
    """

    request: str
    group: str
    index: Count
    prompt_tokens: Count
    response_tokens: Count
    segments: tuple[Segment, ...]
    staleness: Serial
    finish: str
    masked_tokens: Count = 0


class Launch(msgspec.Struct, frozen=True):
    """Start generating: `deferred` deferred groups, then `fresh` fresh ones.

    `oversample` multiplies the samples of a group; the first to finish are kept.
    """

    fresh: Count = 0
    deferred: Count = 0
    oversample: Times = 1.0


class DeliveredGroup(msgspec.Struct, frozen=True):
    """A delivered group: the response tokens of its samples, in any order."""

    prompt_tokens: Count
    lengths: tuple[Count, ...]


# ------------------------------------------------------------------------------------------
# What must outlive the scheduler of a run: facts, not the events that led to them.
#
# A `RunState` is all that a fresh scheduler needs to go on (see `restart.restore`). It holds counts
# and names, no tokens and no instances: the driver has the tokens, and instances join again. A
# request in flight is recorded as if its instance were lost now: with its streamed tokens and
# without its attempt. Direct requests are not included, because their clients are gone.
#
# So to the core a restart is the loss of every instance, a case that it handles already: no state
# is "restored", and no event has a special rule for it. Rests, failures and suspicions are
# forgotten, because they are about instances, which join again; so is the state of random number
# generators.

GroupStands = Literal["fresh", "active", "spent", "deferred", "judging", "complete"]
RequestStands = Literal["waiting", "parked", "acting", "finished"]


class RequestFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A request of a group; `core.model.Request` says what the fields mean.

    state            "waiting" or in flight; "parked" until its group is launched again, or the
                     round's budget renewed; "acting", with its tool; or "finished"
    segments         its kept tokens, in order
    observed_tokens  tokens of its context that tools have returned
    """

    index: Count
    serial: Serial
    state: RequestStands
    segments: tuple[Segment, ...] = ()
    observed_tokens: Count = 0
    computed_tokens: Count = 0
    turn: Count = 0
    finish: str = ""
    salt: Serial | None = None
    last_attempt: Serial = 0
    last_instance: str | None = None
    migrations: Count = 0

    @property
    def response_tokens(self) -> int:
        return sum([segment.tokens for segment in self.segments])


class GroupFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A group that is neither delivered nor lost; `core.model.Group` says what the fields mean.

    started   whether staleness applies to it
    history   response lengths of a prompt that has no name, by delivery (`LengthHistory`)
    finished  the indices of the finished requests, in order of finishing
    """

    group: str
    serial: Serial
    samples: Size
    prompt_tokens: Count
    max_tokens: Count
    prompt: str = ""
    expected_tokens: Count = 0
    history: tuple[tuple[Count, ...], ...] = ()
    state: GroupStands = "fresh"
    started: bool = False
    oldest_version: Serial | None = None
    launch_place: Count = 0
    launch_size: Count = 1
    finished: tuple[Count, ...] = ()
    requests: tuple[RequestFacts, ...] = ()
    judged: bool = False
    resumable: bool = True
    min_samples: Size = 0

    def as_submitted(self) -> GroupFacts:
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
    """Response lengths of a prompt's earlier groups, by delivery (`LengthHistory`)."""

    prompt: str
    deliveries: tuple[tuple[Count, ...], ...]


#: Groups that the round makes up for if it loses them (`RunProgress.group_lost`).
_OF_THE_ROUND: Final = frozenset({"active", "judging", "complete"})


class RunFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The counters of a run; most are `core.state.progress.RunProgress`'s.

    now           time of the last event, in seconds of the run
    loads         the newest version is ours to load (`core.decide.weights`)
    whole_at      the version that took the last whole batch
    window        groups of the selection's window that have not started
    serials       the last serial number
    attempts      the id of the last attempt
    instances     how many are here and not leaving, or are waited for (`core.decide.order`)
    max_kv_tokens KV of the longest request that an instance so far could hold
    lost          groups that the round has lost and that are not made up for yet
    """

    now: float = 0.0
    version: Serial = 0
    loads: bool = True
    closed: bool = False
    trainer_waiting: bool = False
    takes_parts: bool = False
    shares_gpus: bool = False
    delivered: Serial = 0
    batches: Serial = 0
    parts: Size = 0
    in_batch: Size = 0
    whole_at: Serial | None = None
    round: Launch | None = None
    window: Count = 0
    serials: Serial = 0
    attempts: Serial = 0
    instances: Count = 0
    max_kv_tokens: Serial = 0
    lost: Count = 0

    def after_losses(self, written: Iterable[GroupFacts], kept: Iterable[GroupFacts]) -> RunFacts:
        """The counters if not all groups can go on as written. The round makes up for groups that
        it has lost, as when a group fails or starts over. The window shrinks by the groups it has
        lost; a launched group that starts over came before all groups outside the window, so it
        belongs to the window again.
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
    """The whole state. Groups and prompts in any order; `recent` as in `core.roles.Progress`."""

    run: RunFacts = RunFacts()
    groups: tuple[GroupFacts, ...] = ()
    prompts: tuple[PromptFacts, ...] = ()
    recent: tuple[DeliveredGroup, ...] = ()
