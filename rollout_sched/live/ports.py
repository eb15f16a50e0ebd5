"""What the driver asks of the world: instances to talk to, and payloads for them to work on.

The core counts tokens; the tokens themselves travel between these two, and nothing else of the
driver ever looks at them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.errors import RolloutError
from rollout_sched.core.events import Spans
from rollout_sched.core.model import DeliveredSample

#: Characters of what somebody else says that we repeat.
EXCERPT = 500


def printable(text: str, most: int = EXCERPT) -> str:
    """What somebody else says, as it can stand in a log or an answer: one line, and not long."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(c if c.isprintable() else " " for c in cut)


class InstanceError(RolloutError, RuntimeError):
    """An instance did not do what it was asked; the request may be tried again elsewhere.

    The text often holds what the instance said, so it is made fit for a log.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


class InstanceGone(InstanceError):
    """Nothing listens there any more."""


class ConnectionBroken(InstanceError):
    """The connection broke under a request: the instance may have seen it, and may be gone."""


class InstanceUnreached(ConnectionBroken):
    """No connection came about: the instance has not seen the request."""


class AnswerUntrue(InstanceError):
    """What an instance said cannot be true: nothing that it streamed is gone on from."""


class WeightsUnknown(AnswerUntrue):
    """An answer made by other weights than any that we know of: the instance was restarted."""


class RequestRejected(RolloutError, RuntimeError):
    """The request itself is at fault: no other instance would take it either.

    `status` and `body` are for its client: what an instance answered (HTTP 4xx), or 500 with
    nothing where the request could not even be sent. `because`: what it was rejected for, where
    that says something about the instance. `unquoted`: the text without a word of the instance's
    answer, which may quote the prompt.
    """

    def __init__(
        self,
        text: str,
        status: int = 400,
        body: bytes = b"",
        *,
        because: Exception | None = None,
        unquoted: str = "",
    ) -> None:
        super().__init__(text)
        self.unquoted = unquoted or text
        self.status = status
        self.body = body
        self.because = because


class Order(msgspec.Struct, frozen=True):
    """One attempt as an instance gets it.

    id              unique over all drivers, for aborting
    token_ids       the whole context: prompt, response so far, observations
    max_new_tokens  how many it may generate
    salt            prefix-cache namespace (vLLM's cache_salt)
    sampling        vLLM SamplingParams by name, less n and max_tokens
    stream_every    tokens between partial results; 0: only one answer, at the end
    session         for instances that route inside themselves; "" for none
    """

    id: str
    token_ids: Sequence[int]
    max_new_tokens: int
    salt: str
    sampling: Mapping[str, Any]
    stream_every: int = 0
    session: str = ""


class PromptToken(msgspec.Struct, frozen=True, gc=False):
    """What a model thinks of a token of its prompt: its log-probability, and its rank from 1."""

    logprob: float
    rank: int


class Output(msgspec.Struct):
    """What an attempt made.

    `logprobs` has one for each of `token_ids`, or is None if none were asked for. `finish` "abort"
    means stopped from outside, with everything made so far. `spans` as in `core.events`, with the
    instance's own versions; empty if it does not say. `prompt` has one entry for each token of the
    context but the first, if sampling asked for "prompt_logprobs"; else it is None.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish: Literal["stop", "length", "abort"]
    spans: Spans = ()
    prompt: list[PromptToken] | None = None


class Description(msgspec.Struct, frozen=True):
    """What an instance is, asked once when it joins.

    slots          sequences it runs at once
    kv_tokens      of KV cache
    max_model_len  tokens of prompt and response together
    version        its policy version; None if it does not say
    started_at     Unix seconds; another value later means that it was restarted; 0 if unknown
    model          the served model's name
    models         all names that it serves, where it serves several
    capabilities   what was detected, such as "generate", "abort", "pause", "weight_versions"
    paused         whether it is paused now; None if it does not say
    """

    slots: int
    kv_tokens: int
    max_model_len: int
    version: int | None = None
    started_at: float = 0.0
    model: str = ""
    capabilities: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    paused: bool | None = None


class Gauges(msgspec.Struct, frozen=True):
    """One poll of an instance; counters since it started (see `events.InstanceReported`).

    `started_at` as in `Description`.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    generated_tokens: int = 0
    started_at: float = 0.0


OnTokens = Callable[[Sequence[int], Sequence[float] | None], None]


class InstanceClient(Protocol):
    """A connection to one instance. Every call may raise InstanceError.

    Cancelling `generate` gives the slot back and loses what was not streamed.
    """

    @property
    def name(self) -> str: ...

    async def describe(self) -> Description: ...

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        """Run an attempt to its end. `on_tokens` gets what a stream brings, as it comes, and need
        not get what comes with its end; the output holds all. Raises RequestRejected if the request
        is at fault."""

    async def abort(self, order_id: str) -> None:
        """Ask it to stop; the answer is `generate`'s. Unknown ids are ignored, so an abort that
        overtakes its order must be repeated."""

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: int) -> None:
        """Label the tokens to come; changes no weights. Does nothing where it is not offered."""

    async def gauges(self) -> Gauges: ...

    async def weight_version(self) -> int | None:
        """The version that it says its weights have now; None if it says none. Asked of those with
        the capability "weight_info" alone."""

    async def is_paused(self) -> bool | None:
        """Whether it makes no tokens now, whoever has paused it; None if it does not say. Asked of
        those with the capability "pause" alone."""

    async def close(self) -> None: ...


#: Brings an instance to a version; what it raises makes the instance unfit until it is restarted.
WeightLoader = Callable[[Any, int], Awaitable[None]]


def brings_weights(loader: WeightLoader | None) -> bool:
    """Whether a loader can bring an instance that comes later to its version. One that can only
    wait until somebody else has says so: `brings_weights = False`."""
    return loader is not None and bool(getattr(loader, "brings_weights", True))


class Outcome(msgspec.Struct):
    """The end of an attempt as the core counts it, and the `piece` that its payload may keep.

    `finish` "turn": a turn of a trajectory is over, and a tool is to work (`Acting`).
    """

    tokens: int
    finish: Literal["stop", "length", "abort", "turn"]
    spans: Spans
    piece: Any


#: Told how an attempt ended: once, or not at all if it was cancelled. After an error the attempt is
#: cancelled, for what it still holds.
Over = Callable[[Outcome | Exception], None]


class Attempting(Protocol):
    """An attempt under way."""

    def cancel(self) -> None:
        """Nobody waits for it any more, so free what it holds; `over` hears nothing."""


class Transcript(Protocol):
    """What the attempts of a request have made: one piece for each, in order.

    Joined they are always exactly the tokens that the core counts.
    """

    def streamed(self, attempt: int) -> int:
        """How many tokens the stream of an attempt has brought so far."""

    def partial(self, attempt: int, tokens: int) -> Any:
        """The piece of an attempt that broke off: the first `tokens` tokens of its stream."""

    def keep(self, attempt: int, tokens: int, piece: Any) -> None:
        """Append a piece; of a piece that is longer than `tokens`, only so many."""

    def drop(self, attempt: int) -> None:
        """Forget the piece of one attempt; 0: everything."""

    def detach(self) -> None:
        """What is kept is no attempt's any more: another scheduler will number its own."""

    def cut(self, tokens: int) -> None:
        """Forget the last `tokens` that were generated, or everything where a tool has answered one
        of those. Called of verified requests alone."""


class Responder(Protocol):
    """Whoever waits for a request. Exactly one of the two is called, once, unless the request is
    delivered with its group."""

    def answer(self, sample: DeliveredSample) -> None:
        """A direct request is finished; hand its transcript to the client that waits."""

    def fail(self, reason: str, error: Exception | None) -> None:
        """It ended without an answer: "failed", with the last error, or "withdrawn"."""


class Payload(Protocol):
    """What one request is about: how it is attempted, what the attempts made, and who waits."""

    @property
    def transcript(self) -> Transcript: ...
    @property
    def responder(self) -> Responder: ...

    def begin(self, client: Any, dispatch: Dispatch, order_id: str, over: Over) -> Attempting:
        """Begin to carry out a dispatch; `over` hears nothing before this has returned.

        An InstanceError that it raises, or tells `over`, ends the attempt. Anything else that it
        raises ends the request: what cannot be sent here cannot be sent elsewhere."""


#: Told how many leading tokens of an attempt's draft have passed; answers how the attempt goes on,
#: or None if it is to stop.
Passed = Callable[[int], Awaitable[Dispatch | None]]


class Verifying(Payload, Protocol):
    """A payload whose old tokens can be verified (see `core.verification`)."""

    def begin_verified(
        self, client: Any, dispatch: Dispatch, order_id: str, passed: Passed, over: Over
    ) -> Attempting:
        """As `begin`, for a dispatch with a draft: tells `passed` what is kept of it, then goes on
        from there."""


#: The payload of a finished sample, with its tokens.
PayloadOf = Callable[[DeliveredSample], Payload]


class SampleJudge(Protocol):
    """Whoever knows what finished samples are worth, and so which groups are to be trained."""

    async def judge(self, sample: DeliveredSample, payload_of: PayloadOf) -> Any:
        """Find out what a sample is worth, that has just finished. What it raises fails its group.
        Cancelled when the sample is thrown away or goes on."""

    def note(self, sample: DeliveredSample, worth: Any) -> None:
        """What that came to, if it still counts."""

    def forget(self, request: str) -> None:
        """It is thrown away, or goes on; nothing need be known of it."""

    async def keeps(self, samples: Sequence[DeliveredSample], payload_of: PayloadOf) -> bool:
        """Whether a whole group is to be trained, of which every sample is judged. What it raises
        fails the group."""


class Acting(Payload, Protocol):
    """A payload whose attempts may end with "turn": between two of them a tool works."""

    async def act(self) -> Sequence[int] | Literal["stop", "length"]:
        """Have the tool work on the turn that is over.

        The tokens that it returns; or that the trajectory is over: "stop" because the tool says so,
        "length" because there is no room for more. What it raises ends the request. Cancelled when
        nobody wants the trajectory any more.
        """

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        """Append to the transcript what the tool returned to the turn that this attempt made."""
