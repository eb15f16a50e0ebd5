"""The nouns: Instance, Attempt, Group, Request, Segment, Sample.

Everything here holds counts, never tokens: the tokens and their log-probabilities stay with the
driver. The scheduler alone changes these objects; policies read them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class RequestState(StrEnum):
    """Where a request is in its life; `lifecycle.py` says how it moves."""

    WAITING = "waiting"  # may be dispatched now
    RUNNING = "running"  # an attempt is on an instance
    INTERRUPTING = "interrupting"  # told to stop, its answer has not come yet
    ACTING = "acting"  # between two turns: a tool or an environment works
    PARKED = "parked"  # in the replay buffer, until its group is launched again
    FINISHED = "finished"  # generation is over, the sample waits for its group
    ENDED = "ended"  # delivered or discarded; never seen again


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
    place: int = -1
    stamp: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def __repr__(self) -> str:
        return f"<Instance {self.id} v{self.version} {self.status} {self.in_flight}/{self.slots}>"


class Group(msgspec.Struct, eq=False):
    """The requests of one prompt, delivered together.

    `samples` is how many finished requests make it whole. `oldest_version` is the oldest version
    that may have made any of its tokens (None: none were made). `lengths` holds the response
    lengths of its finished requests, ascending; `lesson` is what the prediction made of them.
    The requests of a `direct` group came one by one and leave one by one; it is never whole.
    """

    id: str
    serial: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    direct: bool = False
    requests: list[Request] = msgspec.field(default_factory=list)
    finished: list[Request] = msgspec.field(default_factory=list)
    lengths: list[int] = msgspec.field(default_factory=list)
    lesson: int | None = None
    oldest_version: int | None = None
    active: bool = False
    deferrals: int = 0

    @property
    def complete(self) -> bool:
        return len(self.finished) >= self.samples and not self.direct

    def __repr__(self) -> str:
        return f"<Group {self.id} {len(self.finished)}/{self.samples} v{self.oldest_version}>"


class Request(msgspec.Struct, eq=False):
    """One generation we own, across all its attempts.

    `context_tokens` is what the next attempt has to have in its KV cache: the prompt, everything
    generated and everything observed. `response_tokens` is what was generated. `expected_tokens`
    is the predicted total response. `computed_tokens` leading tokens of the context went through an
    instance before. `rank` is its place in the waiting queue, None outside of it. `failures` counts
    the attempts that failed in a row, on the instances `failed_on`; after one it may rest.
    """

    id: str
    group: Group
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
    home: str | None = None
    session: str = ""
    salt: int | None = None
    failures: int = 0
    failed_on: tuple[str, ...] = ()
    rests_until: float = 0.0
    finish: str = ""
    rank: tuple[object, int] | None = None

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

    `disowned` is the reason its tokens are no longer wanted; the instance still holds the slot
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
    disowned: str = ""


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
