"""The data classes: Instance, Attempt, Siblings, Group, Request, Segment, Sample.

They hold counts, never tokens, which the driver keeps. Only the scheduler changes these objects;
policies read them. They are plain classes with slots: an event writes some twenty of their fields,
and to write a struct's takes more than twice as long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import ceil
from typing import Any, Final

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.records import DeliveredSample, Segment

# ------------------------------------------------------------------------------------------
# The history of response lengths by prompt: the lengths of a prompt's earlier groups.
#
# A prompt comes again in every epoch, and its responses are about as long as before (RhymeRL, arXiv
# 2508.18588, schedules by that). The history starts with what the trainer knew of a prompt when it
# first came, and every delivery adds to it. Nothing else does, so the journal can restore it.

#: Lengths remembered per prompt: enough for several groups of the usual sizes, and no more memory
#: than a prompt's name and tokens take elsewhere.
MAX_LENGTHS = 32


class PromptLengths:
    """Response lengths of one prompt, shared by all current groups of the prompt.

    `ascending`: the lengths of the newest deliveries, as many whole deliveries as fit. A single
    delivery that is too large is thinned evenly by rank, because its order is that of finishing.
    """

    __slots__ = ("_deliveries", "ascending")

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._deliveries: list[list[int]] = []
        self.ascending: list[int] = []
        if lengths:
            self.note(lengths)

    @property
    def deliveries(self) -> tuple[tuple[int, ...], ...]:
        """The remembered deliveries, oldest first; noting them in this order gives the same."""
        return tuple([tuple(delivery) for delivery in self._deliveries])

    def note(self, lengths: Sequence[int]) -> None:
        """A group was delivered with these response lengths, in any order."""
        deliveries = self._deliveries
        deliveries.append(_thinned(sorted(lengths)))
        while sum([len(delivery) for delivery in deliveries]) > MAX_LENGTHS:
            del deliveries[0]
        self.ascending = sorted([length for delivery in deliveries for length in delivery])

    def quantile(self, share: float) -> int | None:
        """The least length that this share (0 to 1) of them does not exceed; None if empty."""
        lengths = self.ascending
        if not lengths:
            return None
        return lengths[max(0, ceil(share * len(lengths) - 1e-9) - 1)]

    def __repr__(self) -> str:
        return f"<PromptLengths {self.ascending}>"


class LengthHistory:
    """`PromptLengths` by the name of the prompt."""

    def __init__(self) -> None:
        self._prompts: dict[str, PromptLengths] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._prompts

    def __iter__(self) -> Iterator[str]:
        return iter(self._prompts)

    def lengths(self) -> dict[str, list[int]]:
        """All lengths by prompt, ascending."""
        return {prompt: known.ascending for prompt, known in self._prompts.items()}

    def lengths_of(self, prompt: str, before: Sequence[int] = ()) -> PromptLengths:
        """A prompt's lengths; `before` is what was known of them when it first comes.

        A prompt without a name ("") cannot be recognised later, so its lengths are not kept.
        """
        if not prompt:
            return PromptLengths(before)
        known = self._prompts.get(prompt)
        if known is None:
            known = self._prompts[prompt] = PromptLengths(before)
        return known


def _thinned(ascending: list[int]) -> list[int]:
    """At most `MAX_LENGTHS` of the lengths, evenly by rank."""
    here, most = len(ascending), MAX_LENGTHS
    if here <= most:
        return ascending
    return [ascending[(2 * rank + 1) * here // (2 * most)] for rank in range(most)]


__all__ = [
    "Attempt",
    "DeliveredSample",
    "Group",
    "GroupState",
    "Instance",
    "InstanceStatus",
    "Request",
    "RequestState",
    "Segment",
    "Siblings",
]


class RequestState(StrEnum):
    """Where a request is in its life; `lifecycle.py` says how it moves."""

    WAITING = "waiting"  # may be dispatched now
    RUNNING = "running"  # an attempt is on an instance
    INTERRUPTING = "interrupting"  # told to stop, has not answered yet
    ACTING = "acting"  # between two turns: a tool or an environment works
    PARKED = "parked"  # in the replay buffer, until its group is launched again
    FINISHED = "finished"  # generation is over, the sample waits for its group
    ENDED = "ended"  # delivered or discarded; never seen again


class GroupState(StrEnum):
    """Where a group is in its life; `groups.py` says how it moves."""

    FRESH = "fresh"  # submitted, never launched
    ACTIVE = "active"  # launched: its requests may run
    SPENT = "spent"  # all its unfinished requests have used up the round's budget of tokens
    DEFERRED = "deferred"  # set back to a later round, with or without its tokens
    JUDGING = "judging"  # whole, waits for its judgement
    COMPLETE = "complete"  # whole, waits for its batch
    DELIVERED = "delivered"
    FAILED = "failed"  # it can never be whole, or judged
    FILTERED = "filtered"  # judged, and not to be trained


class InstanceStatus(StrEnum):
    """What an instance may do; `decide/weights.py` and `decide/lending.py` say how it moves."""

    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new, finishes its attempts, then gets its weights
    PAUSING = "pausing"  # told to pause, has not confirmed
    UPDATING = "updating"  # weights are on their way
    GATED = "gated"  # has its weights, waits for the instances updated together with it
    LENDING = "lending"  # makes way for the trainer: its requests go on elsewhere
    LENT = "lent"  # the trainer has its GPUs
    LOST = "lost"  # gone; only old references still point to it


# Final, so that compiled code need not look them up, which would be a Python call.
_PARKED: Final = RequestState.PARKED
_FRESH: Final = GroupState.FRESH
_ACTIVE: Final = GroupState.ACTIVE
_SERVING: Final = InstanceStatus.SERVING


class Instance:
    """One inference server we can send requests to.

    `tokens` is the sum over its attempts of the context sent and the tokens still expected: the
    load that `least_tokens` balances. `max_context` is how many tokens one request may have, prompt
    and response. `serial` is the order of joining and breaks ties. `suspects` are the requests that
    failed on it since its last answer and may be at fault themselves; `faults` counts those of them
    that succeeded elsewhere; `rests` counts its rests since then (see `core.work.attempts`).
    `report` is its last poll, however old, `report_before` the one before that; `unreported` counts
    the attempts sent since the last poll, and `observed` is what the admission derived from the
    polls. `resident` are the requests between two turns whose KV it has. `finished` counts the
    requests that finished on it, `finished_tokens` the tokens of their contexts, if the admission
    needs them. While `gate_closed` is set, another party controls the instance, and nothing new is
    sent to it. `open_index`, `heap_version` and `accepts_sessions` belong to the fleet.
    """

    __slots__ = (
        "accepts_sessions",
        "attempts",
        "faults",
        "finished",
        "finished_tokens",
        "gate_closed",
        "heap_version",
        "id",
        "kv_tokens",
        "last_dispatch",
        "leaving",
        "max_context",
        "observed",
        "open_index",
        "report",
        "report_before",
        "resident",
        "rests",
        "rests_until",
        "serial",
        "slots",
        "status",
        "suspects",
        "tokens",
        "unreported",
        "version",
    )

    def __init__(self, id: str, serial: int, slots: int, kv_tokens: int, version: int) -> None:
        self.id = id
        self.serial = serial
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.max_context = kv_tokens
        self.version = version
        self.status = _SERVING
        self.attempts: dict[int, Attempt] = {}
        self.tokens = 0
        self.last_dispatch = 0
        self.rests_until = 0.0
        self.rests = 0
        self.faults = 0
        self.suspects: set[str] = set()
        self.leaving = False
        self.gate_closed = False
        self.report: InstanceReported | None = None
        self.unreported = 0
        self.observed: Any = None
        self.resident: dict[str, Request] = {}
        self.finished = 0
        self.finished_tokens = 0
        self.report_before: InstanceReported | None = None
        self.open_index = -1
        self.heap_version = 0
        self.accepts_sessions = False

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    @property
    def sessions(self) -> int:
        """Requests whose KV the instance has: those in flight and those between two turns."""
        return len(self.attempts) + len(self.resident)

    def __repr__(self) -> str:
        return f"<Instance {self.id} v{self.version} {self.status} {self.in_flight}/{self.slots}>"


class Siblings:
    """Requests with the same prompt and limit: the length of one helps to predict the others.

    `lengths` holds the response lengths of finished siblings, ascending; `estimate` is the
    prediction made from them. `requests` are the current siblings; `joined` counts those that came
    one by one (direct requests). `prompt` names the prompt in every epoch. `history` holds the
    lengths of its earlier responses (None if no role uses them), `expected_tokens` the response
    length that the trainer expects (0: unknown).
    """

    __slots__ = (
        "estimate",
        "expected_tokens",
        "history",
        "id",
        "joined",
        "lengths",
        "max_tokens",
        "prompt",
        "prompt_tokens",
        "requests",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        max_tokens: int,
        prompt: str = "",
        history: PromptLengths | None = None,
        expected_tokens: int = 0,
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.prompt = prompt or id
        self.history = history
        self.expected_tokens = expected_tokens
        self.requests: list[Request] = []
        self.lengths: list[int] = []
        self.estimate: int | None = None
        self.joined = 0

    def __repr__(self) -> str:
        return f"<Siblings {self.id} {len(self.requests)}>"


class Group:
    """The requests of one prompt, delivered together.

    `samples` is how many finished requests make it whole: fewer, but not fewer than `min_samples`,
    after some have failed (`min_samples` 0: it fails with them). `oldest_version` is the oldest
    version that may have made any of its tokens (None: it has no tokens). `groups.py` defines how
    its state moves. `launch_place` is its position, from 0, among the `launch_size` groups of its
    last launch. `judged`: once whole, it is judged before it may be delivered; `judgement` is the
    number of the Judge that waits for an answer, 0 if none. `resumable`: as of its requests.
    """

    __slots__ = (
        "finished",
        "id",
        "judged",
        "judgement",
        "launch_place",
        "launch_size",
        "min_samples",
        "oldest_version",
        "resumable",
        "samples",
        "serial",
        "siblings",
        "state",
    )

    def __init__(
        self,
        id: str,
        serial: int,
        samples: int,
        siblings: Siblings,
        *,
        judged: bool = False,
        resumable: bool = True,
        min_samples: int = 0,
    ) -> None:
        self.id = id
        self.serial = serial
        self.samples = samples
        self.min_samples = min_samples
        self.siblings = siblings
        self.judged = judged
        self.resumable = resumable
        self.judgement = 0
        self.state = _FRESH
        self.finished: list[Request] = []
        self.oldest_version: int | None = None
        self.launch_place = 0
        self.launch_size = 1

    @property
    def requests(self) -> list[Request]:
        return self.siblings.requests

    @property
    def prompt(self) -> str:
        """The name of its prompt, equal in every epoch."""
        return self.siblings.prompt

    @property
    def tokens(self) -> int:
        """The prompt plus the longest response allowed, in tokens."""
        return self.siblings.prompt_tokens + self.siblings.max_tokens

    def __repr__(self) -> str:
        done = f"{len(self.finished)}/{self.samples}"
        return f"<Group {self.id} {self.state} {done} v{self.oldest_version}>"


class Request:
    """One generation we own, across all its attempts.

    `group`: it is delivered with it; None for a direct request. `context_tokens` is what the next
    attempt must have in its KV cache: the prompt, all generated and all observed. `response_tokens`
    is what was generated. `expected_tokens` is the predicted total response. `computed_tokens`
    leading tokens of the context were already processed by an instance. `kv_instance` keeps its KV
    between two turns. `rank` is its entry in the waiting queue. `failures` counts the attempts in a
    row that failed, on the instances `failed_on`, or were lost with nothing; it may rest then. Of
    the requests of its `client` that wait, the one with the lowest `priority` goes first.
    `migrations` counts how often it was interrupted to go on elsewhere. `least_context`: its
    prompt, whose length may be an estimate, was too long for an instance that takes less.
    `resumable`: whether a response that is cut may go on from its tokens. If not, because its
    engine applies something to it as one piece, a cut costs the attempt's tokens: it gets no token
    limit per attempt and does not migrate. `aborted`: it ends with what it has.
    """

    __slots__ = (
        "aborted",
        "attempt",
        "client",
        "computed_tokens",
        "context_tokens",
        "expected_tokens",
        "external_aborts",
        "failed_on",
        "failures",
        "finish",
        "group",
        "id",
        "index",
        "kv_instance",
        "last_attempt",
        "last_instance",
        "least_context",
        "migrations",
        "priority",
        "rank",
        "response_tokens",
        "rests_until",
        "resumable",
        "salt",
        "segments",
        "serial",
        "session",
        "siblings",
        "state",
        "turn",
    )

    def __init__(
        self,
        id: str,
        siblings: Siblings,
        group: Group | None,
        index: int,
        serial: int,
        context_tokens: int,
    ) -> None:
        self.id = id
        self.siblings = siblings
        self.group = group
        self.index = index
        self.serial = serial
        self.context_tokens = context_tokens
        self.resumable = group is None or group.resumable
        self.aborted = False
        self.state = _PARKED
        self.attempt: Attempt | None = None
        self.segments: tuple[Segment, ...] = ()
        self.response_tokens = 0
        self.expected_tokens = 0
        self.computed_tokens = 0
        self.turn = 0
        self.last_attempt = 0
        self.last_instance: str | None = None
        self.kv_instance: Instance | None = None
        self.session = ""
        self.client = ""
        self.priority = 0
        self.salt: int | None = None
        self.failures = 0
        self.failed_on: tuple[str, ...] = ()
        self.external_aborts = 0
        self.migrations = 0
        self.least_context = 0
        self.rests_until = 0.0
        self.finish = ""
        self.rank: Any = None

    @property
    def active(self) -> bool:
        """Whether its group, if any, lets it run now."""
        return self.group is None or self.group.state is _ACTIVE

    @property
    def remaining_tokens(self) -> int:
        """How many response tokens it may still make."""
        return self.siblings.max_tokens - self.response_tokens

    @property
    def resumed(self) -> bool:
        """True if earlier attempts left tokens to go on from."""
        return self.response_tokens > 0

    @property
    def known_tokens(self) -> int:
        """Known response tokens, including those of the running attempt."""
        running = self.attempt.tokens if self.attempt is not None else 0
        return self.response_tokens + running

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state} {self.response_tokens} tokens>"


class Attempt:
    """One dispatch of a request to one instance; its id is the fencing token of every answer.

    `abandoned` is the reason why its tokens are no longer wanted; the instance still holds the slot
    until it has answered.
    """

    __slots__ = (
        "abandoned",
        "context_tokens",
        "expected_tokens",
        "id",
        "instance",
        "max_new_tokens",
        "request",
        "tokens",
        "version",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        instance: Instance,
        version: int,
        context_tokens: int,
        max_new_tokens: int,
        expected_tokens: int,
    ) -> None:
        self.id = id
        self.request = request
        self.instance = instance
        self.version = version
        self.context_tokens = context_tokens
        self.max_new_tokens = max_new_tokens
        self.expected_tokens = expected_tokens
        self.tokens = 0
        self.abandoned = ""


# ------------------------------------------------------------------------------------------
# Direct requests that differ only by chance: the length of one helps to predict the others.
#
# A client that waits for one response belongs to no batch. Its siblings are the current requests
# with the same group name, prompt length and limit; others do not help the prediction.

#: Siblings per set. Each answer updates all of them, so without a bound a client that never changes
#: its group would make every request more expensive than the one before.
MAX_SIBLINGS = 64


class DirectSiblings:
    """The sibling sets that a new direct request can join."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], Siblings] = {}

    def __len__(self) -> int:
        return len(self._open)

    def values(self) -> list[Siblings]:
        return list(self._open.values())

    def join(self, name: str, prompt_tokens: int, max_tokens: int) -> Siblings:
        """The siblings that the request joins; it is counted among them."""
        key = (name, prompt_tokens, max_tokens)
        siblings = self._open.get(key)
        if siblings is None or siblings.joined >= MAX_SIBLINGS:
            siblings = self._open[key] = Siblings(name, prompt_tokens, max_tokens)
        siblings.joined += 1
        return siblings

    def leave(self, request: Request) -> None:
        """The request is over."""
        siblings = request.siblings
        siblings.requests.remove(request)
        key = (siblings.id, siblings.prompt_tokens, siblings.max_tokens)
        if not siblings.requests and self._open.get(key) is siblings:
            del self._open[key]


#: Clients that never end their sessions must not fill the memory.
LIMIT = 100_000


class Sessions:
    """Session -> the instance of its last request; the least recently used are forgotten.

    `moves` counts the requests that were sent to another instance than the one before.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.moves = 0
        self._limit = limit
        self._instances: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def last_instance(self, session: str) -> str | None:
        return self._instances.get(session)

    def sent(self, session: str, instance: str) -> None:
        self.moves += self._instances.get(session, instance) != instance
        self._instances[session] = instance
        self._instances.move_to_end(session)
        if len(self._instances) > self._limit:
            self._instances.popitem(last=False)

    def end(self, session: str) -> bool:
        """False if the session is unknown."""
        return self._instances.pop(session, None) is not None
