"""The interfaces that the driver needs from outside: instances, and payloads for them.

The core only counts tokens. The tokens themselves pass between these two, and no other part of the
driver looks at them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Spans
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import Count, Serial

#: Most characters of foreign text that we repeat.
EXCERPT = 500


def printable(text: str, limit: int = EXCERPT) -> str:
    """Foreign text made fit for a log or an answer: one line of limited length."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(c if c.isprintable() else " " for c in cut)


#: What a failed attempt suggests about its instance; "pause": that somebody else pauses it or loads
#: weights.
Suspicion = Literal["restart", "pause"]


class InstanceError(RolloutError, RuntimeError):
    """An instance did not do what was requested; the request may be retried elsewhere.

    The text often contains the instance's words. `unquoted`, for logs, is the text without them:
    they may be a part of a prompt or of a response.
    """

    def __init__(self, text: str = "", *, unquoted: str = "") -> None:
        super().__init__(printable(text))
        self._unquoted = printable(unquoted)

    def within(self, what: str) -> InstanceError:
        """An InstanceError with the prefix `what`, in both texts."""
        return InstanceError(f"{what}{self}", unquoted=f"{what}{self.unquoted}")


class InstanceGone(InstanceError):
    """Nothing listens at the instance's address any more."""


class EnginePaused(InstanceError):
    """The instance is paused and takes no request until it is resumed: nobody is at fault."""


class ConnectionBroken(InstanceError):
    """The connection broke during a request: the instance may have seen it, and may be gone."""


class InstanceUnreached(ConnectionBroken):
    """No connection could be made: the instance has not seen the request."""


class AnswerUntrue(InstanceError):
    """An instance's answer cannot be true: the attempt's streamed tokens are dropped."""


class WeightsUnknown(AnswerUntrue):
    """An answer was made by weights that we do not know: the instance was restarted."""


class RequestRejected(RolloutError, RuntimeError):
    """The request itself is invalid: no other instance would accept it either.

    `status` and `body` are for its client: the instance's answer (HTTP 4xx), or 500 with an empty
    body if the request could not be sent. `because`: the cause of the rejection, if it says
    something about the instance. `unquoted`: as of an InstanceError.
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
        self._unquoted = unquoted
        self.status = status
        self.body = body
        self.because = because


class RequestTooLong(RequestRejected):
    """The request is too long for its instance: one that takes longer ones may accept it."""


class Order(msgspec.Struct, frozen=True):
    """One attempt as it is sent to an instance.

    id              unique over all drivers, for aborting
    token_ids       the whole context: prompt, response so far, observations
    max_new_tokens  how many tokens it may generate
    salt            prefix-cache namespace (vLLM's cache_salt)
    sampling        vLLM SamplingParams by name, without n and max_tokens
    stream_every    tokens between partial results; 0: only one answer, at the end
    session         for instances that route internally; "" for none
    """

    id: str
    token_ids: Sequence[int]
    max_new_tokens: int
    salt: str
    sampling: Mapping[str, Any]
    stream_every: int = 0
    session: str = ""


class Output(msgspec.Struct):
    """The result of an attempt.

    `logprobs` has one entry for each of `token_ids`; None if not requested. `finish` "abort" means
    stopped from outside, with everything made so far. `spans` as in `core.events`, with the
    versions that the instance reports; empty if it reports none.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish: Literal["stop", "length", "abort"]
    spans: Spans = ()


class Description(msgspec.Struct, frozen=True):
    """What an instance reports of itself; asked once when it joins.

    slots          sequences that it runs at once
    kv_tokens      tokens that its KV cache holds
    max_model_len  tokens of prompt and response together
    version        its policy version; None if it reports none
    started_at     Unix seconds; another value later means that it was restarted; 0 if unknown
    model          the served model's name
    models         all names that it serves, if it serves several
    capabilities   what was detected, such as "generate", "abort", "pause", "weight_versions"
    paused         whether it is paused now; None if it does not report that
    precision      of its weights, and of its KV cache if that is another, such as "bfloat16" or
                   "fp8, kv fp8"; "" if it does not report them
    """

    slots: Count
    kv_tokens: Serial
    max_model_len: Count
    version: Serial | None = None
    started_at: float = 0.0
    model: str = ""
    capabilities: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    paused: bool | None = None
    precision: str = ""


class Gauges(msgspec.Struct, frozen=True):
    """One poll of an instance; counters are since its start (see `events.InstanceReported`).

    `started_at` as in `Description`. `drafts`: how often tokens were drafted for a sequence.
    """

    running: Count
    waiting: Count
    kv_usage: float
    preemptions: Serial = 0
    prefill_tokens: Serial = 0
    cached_tokens: Serial = 0
    reprefilled_tokens: Serial = 0
    generated_tokens: Serial = 0
    started_at: float = 0.0
    drafts: Serial = 0
    drafted_tokens: Serial = 0
    accepted_tokens: Serial = 0


OnTokens = Callable[[Sequence[int], Sequence[float] | None], None]


class InstanceClient(Protocol):
    """A connection to one instance. Every call may raise InstanceError.

    Cancelling `generate` frees the slot and loses the tokens that were not streamed.
    """

    @property
    def name(self) -> str: ...

    async def describe(self) -> Description: ...

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        """Run an attempt to its end. `on_tokens` gets streamed tokens as they come, but not always
        those that come with the end; the output has all tokens. Raises RequestRejected if the
        request is invalid."""

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        """What its tokenizer makes of token ids; None if it cannot be asked."""

    async def abort(self, order_id: str) -> None:
        """Ask it to stop; `generate` then returns. Unknown ids are ignored, so an abort that
        overtakes its order must be repeated."""

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: int) -> None:
        """Label future tokens; changes no weights. Does nothing if the instance does not support
        it."""

    async def gauges(self) -> Gauges: ...

    async def weight_version(self) -> int | None:
        """The version of its weights that it reports now; None if it reports none. Called only with
        the capability "weight_info"."""

    async def is_paused(self) -> bool | None:
        """Whether it is paused now, by us or by others; None if it does not report that. Called
        only with the capability "pause"."""

    async def close(self) -> None: ...


#: Loads a version into an instance; an error makes the instance unfit until it is restarted.
WeightLoader = Callable[[Any, int], Awaitable[None]]


def brings_weights(loader: WeightLoader | None) -> bool:
    """Whether a loader can load its version into an instance that joins later. A loader that only
    waits until somebody else has loaded it sets `brings_weights = False`."""
    return loader is not None and bool(getattr(loader, "brings_weights", True))


class Outcome(msgspec.Struct):
    """The end of an attempt as the core counts it, and the `piece` that its payload may keep.

    `finish` "turn": a turn of a trajectory is over, and its tool is called next (`Acting`);
    "segment": see `core.model.events.RequestFinished`.
    `resumable` False, with "abort": the answer shows that the response cannot be resumed.
    """

    tokens: int
    finish: Literal["stop", "length", "abort", "turn", "segment"]
    spans: Spans
    piece: Any
    resumable: bool = True


#: Called once with the end of an attempt, or not at all if it was cancelled. After an error the
#: attempt is cancelled, to free what it still holds.
Over = Callable[[Outcome | Exception], None]


class Attempting(Protocol):
    """A running attempt."""

    def cancel(self) -> None:
        """The attempt is no longer needed: free what it holds; `over` is not called."""


class Transcript(Protocol):
    """The tokens of a request: one piece for each attempt, in order.

    Joined, they are always exactly the tokens that the core counts.
    """

    def streamed(self, attempt: int) -> int:
        """How many tokens the stream of an attempt has brought so far."""

    def partial(self, attempt: int, tokens: int) -> Any:
        """The piece of an attempt that ended early: the first `tokens` tokens of its stream."""

    def append(self, attempt: int, tokens: int, piece: Any) -> None:
        """Append a piece, cut to `tokens` tokens if it is longer."""

    def drop(self, attempt: int) -> None:
        """Forget the piece of one attempt; 0: everything."""

    def detach(self) -> None:
        """Detach the kept tokens from attempt numbers: another scheduler numbers its own."""


class Responder(Protocol):
    """The receiver of a request's result. Exactly one of the two methods is called, once, unless
    the request is delivered with its group."""

    def answer(self, sample: DeliveredSample) -> None:
        """A direct request is finished; give its transcript to the waiting client."""

    def fail(self, reason: str, error: Exception | None) -> None:
        """The request ended without an answer: "failed", with the last error, or "withdrawn"."""


class Payload(Protocol):
    """One request's content: how it is attempted, its transcript, and its responder."""

    @property
    def transcript(self) -> Transcript: ...
    @property
    def responder(self) -> Responder: ...
    @property
    def resumable(self) -> bool:
        """As of `core.model.model.Request`."""

    def begin(self, client: Any, dispatch: Dispatch, order_id: str, over: Over) -> Attempting:
        """Start a dispatch; `over` is not called before this has returned.

        An InstanceError that it raises, or passes to `over`, ends the attempt. Any other error that
        it raises ends the request: what cannot be sent to one instance cannot be sent elsewhere.
        """


#: The payload of a finished sample, with its tokens.
PayloadOf = Callable[[DeliveredSample], Payload]


class SampleJudge(Protocol):
    """Computes the rewards of finished samples, and decides which groups are trained."""

    async def judge(self, sample: DeliveredSample, payload_of: PayloadOf) -> Any:
        """Compute the reward of a sample that has just finished. An error fails its group.
        Cancelled when the sample is discarded or continues."""

    def note(self, sample: DeliveredSample, worth: Any) -> None:
        """Record the result of `judge`, if it is still valid."""

    def forget(self, request: str) -> None:
        """The sample is discarded or continues: forget its reward."""

    async def keeps(self, samples: Sequence[DeliveredSample], payload_of: PayloadOf) -> bool:
        """Whether a complete group, with all samples judged, is trained. An error fails the
        group."""


class ToolPayload(Payload, Protocol):
    """A payload whose attempts may end with "turn": a tool is called between two turns."""

    async def act(self) -> Sequence[int] | Literal["stop", "length"]:
        """Call the tool for the turn that is over.

        Returns the tool's tokens, or the end of the trajectory: "stop" if the tool ends it,
        "length" if there is no room for more. An error ends the request. Cancelled when the
        trajectory is no longer needed.
        """

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        """Append to the transcript what the tool returned for the turn of this attempt."""


# ------------------------------------------------------------------------------------------
# Calls to an instance: time limit, error text, and whose cancellation it is.

T = TypeVar("T")


async def with_timeout(question: Coroutine[Any, Any, T], limit_s: float) -> T:
    """The answer. Raises InstanceError if none comes within `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await question
    except TimeoutError as error:
        text = f"no answer within {limit_s:g} s" if limit.expired() else error_line(error)
        raise InstanceError(text) from error


def error_line(error: Exception) -> str:
    """The error as one line, for logs and answers."""
    return printable(str(error) or type(error).__name__)


def plain_message(error: Exception) -> str:
    """The error as one line for a log, without contents of requests and answers."""
    if isinstance(error, RolloutError):
        return printable(error.unquoted)
    return error_line(error) if isinstance(error, OSError) else type(error).__name__


def is_cancelled() -> bool:
    """Whether this task itself is cancelled, not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
