"""The nouns: Instance, Attempt, Siblings, Group, Request, Segment, Sample.

Everything here holds counts, never tokens: the tokens and their log-probabilities stay with the
driver. The scheduler alone changes these objects; policies read them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rollout_sched.core.events import InstanceReported


class RequestState(StrEnum):
    """Where a request is in its life; `lifecycle.py` says how it moves."""

    WAITING = "waiting"  # may be dispatched now
    RUNNING = "running"  # an attempt is on an instance
    INTERRUPTING = "interrupting"  # told to stop, its answer has not come yet
    ACTING = "acting"  # between two turns: a tool or an environment works
    PARKED = "parked"  # in the replay buffer, until its group is launched again
    FINISHED = "finished"  # generation is over, the sample waits for its group
    ENDED = "ended"  # delivered or discarded; never seen again


class GroupState(StrEnum):
    """Where a group is in its life; `groups.py` says how it moves."""

    FRESH = "fresh"  # submitted, never launched
    ACTIVE = "active"  # launched: its requests may run
    DEFERRED = "deferred"  # set back to a later round, with or without its tokens
    COMPLETE = "complete"  # whole, waits for its batch
    DELIVERED = "delivered"
    FAILED = "failed"  # it can never be whole


class InstanceStatus(StrEnum):
    """What an instance may be asked to do; `updater.py` says how it moves."""

    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new, finishes what it has, then gets its weights
    PAUSING = "pausing"  # told to pause, has not confirmed
    UPDATING = "updating"  # weights are on their way
    GATED = "gated"  # has its weights, waits for those updated together with it
    LOST = "lost"  # gone; only old references still show it


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request made under one version on one instance."""

    version: int
    tokens: int
    instance: str


class Instance(msgspec.Struct, eq=False):
    """One inference server we can send requests to.

    `tokens` is the sum over its attempts of the context sent and of the tokens still expected: the
    load that `least_tokens` balances. `serial` is the order of joining and breaks ties. `suspects`
    are the requests that failed here since its last answer and may be at fault themselves; `faults`
    counts those of them that succeeded elsewhere; `rests` its rests since then (see `blame.py`).
    `report` is its last poll, as old as that is. `open_index` and `heap_version` are the fleet's.
    """

    id: str
    serial: int
    slots: int
    kv_tokens: int
    version: int
    status: InstanceStatus = InstanceStatus.SERVING
    attempts: dict[int, Attempt] = msgspec.field(default_factory=dict)
    tokens: int = 0
    last_dispatch: int = 0
    rests_until: float = 0.0
    rests: int = 0
    faults: int = 0
    suspects: set[str] = msgspec.field(default_factory=set)
    leaving: bool = False
    report: InstanceReported | None = None
    open_index: int = -1
    heap_version: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def __repr__(self) -> str:
        return f"<Instance {self.id} v{self.version} {self.status} {self.in_flight}/{self.slots}>"


class Siblings(msgspec.Struct, eq=False):
    """Requests with the same prompt and limit: what the length of one tells about the others.

    `lengths` holds the response lengths of those that have finished, ascending; `estimate` is what
    the prediction made of them. `requests` are those that are here; `joined` counts those that came
    one by one (direct requests).
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    requests: list[Request] = msgspec.field(default_factory=list)
    lengths: list[int] = msgspec.field(default_factory=list)
    estimate: int | None = None
    joined: int = 0

    def __repr__(self) -> str:
        return f"<Siblings {self.id} {len(self.requests)}>"


class Group(msgspec.Struct, eq=False):
    """The requests of one prompt, delivered together.

    `samples` is how many finished requests make it whole. `oldest_version` is the oldest version
    that may have made any of its tokens (None: none were made). `groups.py` says how its state
    moves.
    """

    id: str
    serial: int
    samples: int
    siblings: Siblings
    state: GroupState = GroupState.FRESH
    finished: list[Request] = msgspec.field(default_factory=list)
    oldest_version: int | None = None

    @property
    def requests(self) -> list[Request]:
        return self.siblings.requests

    @property
    def tokens(self) -> int:
        """Of the prompt and the longest response it may get."""
        return self.siblings.prompt_tokens + self.siblings.max_tokens

    def __repr__(self) -> str:
        done = f"{len(self.finished)}/{self.samples}"
        return f"<Group {self.id} {self.state} {done} v{self.oldest_version}>"


class Request(msgspec.Struct, eq=False):
    """One generation we own, across all its attempts.

    `group` is what it is delivered with; None for a direct request, which is answered by itself.
    `context_tokens` is what the next attempt has to have in its KV cache: the prompt, everything
    generated and everything observed. `response_tokens` is what was generated. `expected_tokens`
    is the predicted total response. `computed_tokens` leading tokens of the context went through an
    instance before. `rank` is its place in the waiting queue, None outside of it. `failures` counts
    the attempts that failed in a row, on the instances `failed_on`; after one it may rest.
    """

    id: str
    siblings: Siblings
    group: Group | None
    index: int
    serial: int
    context_tokens: int
    state: RequestState = RequestState.PARKED
    attempt: Attempt | None = None
    segments: tuple[Segment, ...] = ()
    response_tokens: int = 0
    expected_tokens: int = 0
    computed_tokens: int = 0
    turn: int = 0
    last_attempt: int = 0
    last_instance: str | None = None
    session: str = ""
    salt: int | None = None
    failures: int = 0
    failed_on: tuple[str, ...] = ()
    unasked_aborts: int = 0
    rests_until: float = 0.0
    finish: str = ""
    rank: tuple[object, int] | None = None

    @property
    def active(self) -> bool:
        """Whether it may run now, as far as its group is concerned."""
        return self.group is None or self.group.state is GroupState.ACTIVE

    @property
    def remaining_tokens(self) -> int:
        """How many response tokens it may still make."""
        return self.siblings.max_tokens - self.response_tokens

    @property
    def resumed(self) -> bool:
        """True when an earlier attempt left something to go on from."""
        return self.response_tokens > 0

    @property
    def known_tokens(self) -> int:
        """Response tokens we know of, those of the running attempt included."""
        running = self.attempt.tokens if self.attempt is not None else 0
        return self.response_tokens + running

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state} {self.response_tokens} tokens>"


class Attempt(msgspec.Struct, eq=False):
    """One dispatch of a request to one instance; its id is the fencing token of every answer.

    `abandoned` is the reason its tokens are no longer wanted; the instance still holds the slot
    until it has answered.
    """

    id: int
    request: Request
    instance: Instance
    version: int
    context_tokens: int
    max_new_tokens: int
    expected_tokens: int
    tokens: int = 0
    abandoned: str = ""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A finished request as the trainer receives it.

    `staleness` is the trainer's version at delivery minus the oldest version in `segments`.
    `finish` is "stop" or "length".
    """

    request: str
    group: str
    index: int
    prompt_tokens: int
    response_tokens: int
    segments: tuple[Segment, ...]
    staleness: int
    finish: str
