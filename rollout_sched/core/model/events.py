"""Events: what happened, as told to the scheduler. Facts, in the past tense.

Each event carries only what a live fleet can report. `attempt` is the fencing token of the matching
`Dispatch`; answers to any other attempt are counted and dropped. `spans` are ordered
(version, tokens) pairs, as vLLM >= 0.32 reports them; empty means unknown, and then the tokens
count as made by the version that the instance had at dispatch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout_sched.core.model.records import Count, RunState, Segment, Serial, Signed, Size

Spans = tuple[tuple[Serial, Count], ...]

#: Who is at fault for a failed attempt.
Blame = Literal["request", "length", "instance", "unclear", "nobody"]


class _Event(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


class InstanceJoined(_Event, frozen=True, omit_defaults=True):
    """An instance can serve: `slots` sequences at once, `kv_tokens` of KV cache, and at most
    `max_model_len` tokens of prompt and response in one request (0: as many as fit the cache)."""

    instance: str
    slots: Count
    kv_tokens: Serial
    version: Serial = 0
    max_model_len: Count = 0


class InstanceLost(_Event, frozen=True, omit_defaults=True):
    """An instance died or was removed; its work is gone except for the tokens already streamed.

    requested  it was removed on purpose, not by a failure

    To the core an instance that was removed is lost; to the reader of a metric, a log or a picture
    it is not.
    """

    instance: str
    reason: str = ""
    requested: bool = False


class InstanceLeaving(_Event, frozen=True):
    """An instance will leave: it finishes its attempts and takes nothing new."""

    instance: str


class InstanceReported(_Event, frozen=True, omit_defaults=True):
    """A poll of an instance's gauges and counters (counters since it started). The last two are
    those of speculative decoding."""

    instance: str
    running: Count
    waiting: Count
    kv_usage: float
    preemptions: Serial = 0
    prefill_tokens: Serial = 0
    cached_tokens: Serial = 0
    reprefilled_tokens: Serial = 0
    generated_tokens: Serial = 0
    drafted_tokens: Serial = 0
    accepted_tokens: Serial = 0


class GroupSubmitted(_Event, frozen=True, omit_defaults=True):
    """The trainer asks for `samples` responses to one prompt, each of at most `max_tokens`.

    prompt           names the prompt, and is equal in every epoch; "": the group's own name
    history          response lengths of earlier samples of the prompt that the trainer knows
    expected_tokens  the length of one response that the trainer expects; 0: unknown
    judged           once whole, the group is judged (see Judge), and delivered only if it is kept
    resumable        False: a response that is cut cannot go on and starts over (see Request)
    min_samples      it is delivered without the samples that fail, as long as so many are left;
                     0: one that fails, fails the group
    """

    group: str
    samples: Size
    prompt_tokens: Count
    max_tokens: Count
    prompt: str = ""
    history: tuple[Count, ...] = ()
    expected_tokens: Count = 0
    judged: bool = False
    resumable: bool = True
    min_samples: Size = 0


class GroupJudged(_Event, frozen=True):
    """The answer to the Judge with this number: the group is "kept", "filtered" (there is nothing
    to learn from it) or "failed" (it could not be judged)."""

    group: str
    judgement: Serial
    verdict: Literal["kept", "filtered", "failed"]


class RequestSubmitted(_Event, frozen=True, omit_defaults=True):
    """A client waits for this one response; it goes out when finished, independent of batches.

    `group` names its siblings, for prediction. `session` is the conversation it belongs to, whose
    last instance has its KV cache; "" for none. `priority` is as in vLLM, within a client: the
    lowest goes first, and requests of a group have 0. The driver chooses the id and never uses it
    again. `prior_segments`: leading tokens of the response that it made under an earlier scheduler
    and continues from; `ends`: they are the whole response. `resumable`: as of a group. `client`:
    whose it is, for a fair part of the fleet; "" is the trainer.
    """

    request: str
    group: str
    prompt_tokens: Count
    max_tokens: Count
    session: str = ""
    priority: Signed = 0
    prior_segments: tuple[Segment, ...] = ()
    ends: bool = False
    resumable: bool = True
    client: str = ""


class RequestWithdrawn(_Event, frozen=True):
    """The client of a RequestSubmitted has gone: the response is no longer wanted."""

    request: str


class RequestAborted(_Event, frozen=True):
    """Somebody who may has ended a RequestSubmitted: it is answered with what it has, "abort"."""

    request: str


class SessionEnded(_Event, frozen=True):
    """No further request of this session comes."""

    session: str


class SubmissionsClosed(_Event, frozen=True):
    """No further group comes, so the last batches may be short."""


class TokensArrived(_Event, frozen=True):
    """The stream of an attempt reports that it has made `tokens` tokens so far (cumulative)."""

    request: str
    attempt: Serial
    tokens: Count


class RequestFinished(_Event, frozen=True):
    """The attempt ended by itself: "stop", or "length" when it used up its token limit. "segment":
    it used up a limit that is less than the response's, and its last tokens, which are not among
    `tokens`, cannot be resumed from."""

    request: str
    attempt: Serial
    tokens: Count
    spans: Spans = ()
    reason: Literal["stop", "length", "segment"] = "stop"


class TurnFinished(_Event, frozen=True):
    """The attempt ended a turn of a trajectory; a tool or an environment works now."""

    request: str
    attempt: Serial
    tokens: Count
    spans: Spans = ()


class ToolReturned(_Event, frozen=True):
    """The observation that follows the turn made by `attempt`; the trajectory may continue."""

    request: str
    attempt: Serial
    observation_tokens: Count


class TrajectoryEnded(_Event, frozen=True):
    """No turn follows the one made by `attempt`: the tool ended the trajectory ("stop"), its
    observation does not fit ("length"), or the tool failed ("failed").

    An event of its own, because only the tool knows whether a turn was the last, and it may take a
    minute to say so. To wait for the tool before reporting the turn would keep the slot; to report
    the turn as finished would deliver it. A recorded trajectory is known to be over and ends with
    RequestFinished.
    """

    request: str
    attempt: Serial
    reason: Literal["stop", "length", "failed"] = "stop"


class RequestInterrupted(_Event, frozen=True):
    """The attempt was stopped from outside after `tokens` tokens; all of them have arrived.

    `resumable` False: the answer shows that the response cannot be resumed, so its request is not
    cut again where that can be avoided. Unset, and not in a journal, otherwise.
    """

    request: str
    attempt: Serial
    tokens: Count
    spans: Spans = ()
    resumable: bool | msgspec.UnsetType = msgspec.UNSET


class RequestFailed(_Event, frozen=True):
    """The attempt gave no answer.

    blame   who is at fault: the "request" (no instance would answer it), its "length" (an instance
            that takes longer ones may answer it), the "instance" (it could not be reached),
            "unclear" (see `core.work.attempts`), or "nobody" (the instance is paused, and takes no
            request)
    usable  False if the streamed tokens cannot be true, so that the request does not keep them
    """

    request: str
    attempt: Serial
    reason: str = ""
    blame: Blame = "unclear"
    usable: bool = True


class WeightsPublished(_Event, frozen=True, omit_defaults=True):
    """The trainer has finished a step; `version` is ready to be loaded.

    `loads`: we load it, by UpdateWeights. Otherwise the trainer brings it to the instances, and
    WeightsUpdated says which of them have it.
    """

    version: Serial
    loads: bool = True


class InstancePaused(_Event, frozen=True):
    """An instance confirmed a Pause."""

    instance: str


class WeightsUpdated(_Event, frozen=True):
    """An instance now computes with `version`: an UpdateWeights ordered it, or it was found because
    another party loaded it."""

    instance: str
    version: Serial


class GateClosed(_Event, frozen=True):
    """Another party controls an instance: it continues its attempts and gets nothing new until
    GateOpened."""

    instance: str


class GateOpened(_Event, frozen=True):
    """The reason for a closed gate is over: the instance may get new work."""

    instance: str


class InstanceReturned(_Event, frozen=True):
    """The trainer has returned an instance that was lent to it (see Lend)."""

    instance: str


class BatchRequested(_Event, frozen=True):
    """The trainer is idle and wants the next batch.

    With `parts` the trainer takes groups of the batch as they become whole, if the policy delivers
    them so. If it is sent again before the last part, it only changes these flags. With
    `shares_gpus` it trains on the instances' GPUs, and starts on those lent to it (see Lend).
    """

    parts: bool = False
    shares_gpus: bool = False


class Woke(_Event, frozen=True):
    """The time asked for by a Wake has come."""


class Restored(_Event, frozen=True):
    """An earlier scheduler of this run has ended and left `state`. Sent before any other event, not
    earlier than `state.run.now`. Instances join again, and clients ask again, by their own events.
    """

    state: RunState


#: The end of an attempt with an answer.
Answered = RequestFinished | TurnFinished | RequestInterrupted
#: What an instance reports about one attempt.
OfAttempt = TokensArrived | Answered | RequestFailed
#: Events after which a request may be finished.
Ending = Answered | RequestFailed | ToolReturned | TrajectoryEnded
#: What changes a single request that was dispatched before.
OfRequest = TokensArrived | Ending

Event = (
    InstanceJoined
    | InstanceLost
    | InstanceLeaving
    | InstanceReported
    | GroupSubmitted
    | RequestSubmitted
    | RequestWithdrawn
    | RequestAborted
    | SessionEnded
    | SubmissionsClosed
    | OfRequest
    | WeightsPublished
    | InstancePaused
    | WeightsUpdated
    | InstanceReturned
    | BatchRequested
    | Woke
    | Restored
    | GateClosed
    | GateOpened
    | GroupJudged
)
