"""Events: what the world tells the scheduler. Facts, in the past tense.

Each carries only what a live fleet could say. `attempt` is the fencing token that the matching
`Dispatch` carried; answers to any other attempt are counted and dropped. `spans` are
(version, tokens) pairs in order, as vLLM >= 0.32 reports them; empty means the world does not know,
and then the tokens count as made by the version the instance had at dispatch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout_sched.core.run_state import RunState
from rollout_sched.core.samples import Segment

Spans = tuple[tuple[int, int], ...]

#: Whose fault a failed attempt is.
Blame = Literal["request", "instance", "unclear"]


class _Event(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


class InstanceJoined(_Event, frozen=True):
    """An instance can serve: `slots` sequences at once, `kv_tokens` of KV cache."""

    instance: str
    slots: int
    kv_tokens: int
    version: int = 0


class InstanceLost(_Event, frozen=True, omit_defaults=True):
    """An instance died or was removed; whatever it held is gone but for the tokens streamed.

    asked  somebody has removed it: nothing went wrong
    """

    instance: str
    reason: str = ""
    asked: bool = False


class InstanceLeaving(_Event, frozen=True):
    """An instance is to go: it finishes what it has and takes nothing new."""

    instance: str


class InstanceReported(_Event, frozen=True):
    """A poll of an instance's gauges and counters (counters since it started)."""

    instance: str
    running: int
    waiting: int
    kv_usage: float
    preemptions: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    generated_tokens: int = 0


class GroupSubmitted(_Event, frozen=True, omit_defaults=True):
    """The trainer asks for `samples` responses to one prompt, each of at most `max_tokens`.

    prompt           names the prompt, and is equal in every epoch; "": as the group
    history          response lengths of earlier samples of it, as far as the trainer knows some
    expected_tokens  of one response, as far as the trainer has an idea; 0: none
    judged           once whole it is to be judged (see Judge), and delivered only if it is kept
    """

    group: str
    samples: int
    prompt_tokens: int
    max_tokens: int
    prompt: str = ""
    history: tuple[int, ...] = ()
    expected_tokens: int = 0
    judged: bool = False


class GroupJudged(_Event, frozen=True):
    """What a whole group is worth, as the Judge with this number asked: it is "kept", "filtered",
    since there is nothing to learn from it, or "failed", for nobody could tell."""

    group: str
    judgement: int
    verdict: Literal["kept", "filtered", "failed"]


class RequestSubmitted(_Event, frozen=True, omit_defaults=True):
    """A client waits for this one response, whatever the batches do: it goes out when finished.

    `group` names its siblings, for prediction; `session` the conversation it belongs to, whose
    last instance has its KV cache; "" for none. `priority` is as in vLLM: the least goes first, and
    what is of a group has 0. Its id is the driver's and is never used again. `made`: leading tokens
    of the response, under an earlier scheduler, from which it goes on; `ends`: they are all of it.
    """

    request: str
    group: str
    prompt_tokens: int
    max_tokens: int
    session: str = ""
    priority: int = 0
    made: tuple[Segment, ...] = ()
    ends: bool = False


class RequestWithdrawn(_Event, frozen=True):
    """The client of a RequestSubmitted has gone: nobody wants the response any more."""

    request: str


class SessionEnded(_Event, frozen=True):
    """No further request of this session will come."""

    session: str


class SubmissionsClosed(_Event, frozen=True):
    """No further group will come, so the last batches may be short."""


class TokensArrived(_Event, frozen=True):
    """A stream said that the attempt has made `tokens` tokens so far (cumulative)."""

    request: str
    attempt: int
    tokens: int


class PrefixVerified(_Event, frozen=True):
    """The first `tokens` tokens of the draft that the attempt's Dispatch named have passed, and the
    attempt goes on from there. Where that lies before what a tool has answered, none have."""

    request: str
    attempt: int
    tokens: int


class RequestFinished(_Event, frozen=True):
    """The attempt ended by itself: "stop", or "length" when it used up its token limit."""

    request: str
    attempt: int
    tokens: int
    spans: Spans = ()
    reason: Literal["stop", "length"] = "stop"


class TurnFinished(_Event, frozen=True):
    """The attempt ended a turn of a trajectory; a tool or an environment works now."""

    request: str
    attempt: int
    tokens: int
    spans: Spans = ()


class ToolReturned(_Event, frozen=True):
    """The observation that follows the turn made by `attempt`; the trajectory may go on."""

    request: str
    attempt: int
    observation_tokens: int


class TrajectoryEnded(_Event, frozen=True):
    """No turn follows the one made by `attempt`: the tool says so ("stop"), there is no room for
    what it returned ("length"), or it failed."""

    request: str
    attempt: int
    reason: Literal["stop", "length", "failed"] = "stop"


class RequestInterrupted(_Event, frozen=True):
    """The attempt was stopped from outside after `tokens` tokens, all of which we have."""

    request: str
    attempt: int
    tokens: int
    spans: Spans = ()


class RequestFailed(_Event, frozen=True):
    """The attempt gave no answer.

    blame   whose fault it is: the "request"'s, which no instance would answer; the "instance"'s,
            which was never reached; or "unclear" (see `core.blame`)
    usable  False if what its stream has brought cannot be true, and is not gone on from
    """

    request: str
    attempt: int
    reason: str = ""
    blame: Blame = "unclear"
    usable: bool = True


class WeightsPublished(_Event, frozen=True, omit_defaults=True):
    """The trainer has finished a step; `version` is ready to be loaded.

    `loads`: by us, where UpdateWeights says so. Else whoever trains brings it to the instances, and
    WeightsUpdated says which of them has it.
    """

    version: int
    loads: bool = True


class InstancePaused(_Event, frozen=True):
    """An instance confirmed a Pause."""

    instance: str


class WeightsUpdated(_Event, frozen=True):
    """An instance now computes with `version`: as UpdateWeights ordered, or found there, because
    somebody else has loaded it."""

    instance: str
    version: int


class Retuned(_Event, frozen=True):
    """Parameters of the policy have other values from now on: role -> parameter -> value (see
    `core.tuning`)."""

    parameters: dict[str, dict[str, int | float]]


class GateClosed(_Event, frozen=True):
    """Somebody else has an instance in hand: it goes on with what it has and is sent nothing new
    until GateOpened."""

    instance: str


class GateOpened(_Event, frozen=True):
    """What closed the gate of an instance is over."""

    instance: str


class InstanceReturned(_Event, frozen=True):
    """The trainer has given an instance back that was lent to it (see Lend)."""

    instance: str


class BatchRequested(_Event, frozen=True):
    """The trainer is idle and wants the next batch.

    With `parts` it takes groups of it as they become whole, where the policy hands them out so.
    Said again before the last part has come, it only changes that. With `shares_gpus` it trains on
    the instances' GPUs, and begins on those that are lent to it (see Lend).
    """

    parts: bool = False
    shares_gpus: bool = False


class Woke(_Event, frozen=True):
    """The time asked for by a Wake has come."""


class Restored(_Event, frozen=True):
    """An earlier scheduler of this run has ended, and left `state`. Told before anything else, not
    earlier than `state.run.now`. Instances join again, and clients ask again, by their own events.
    """

    state: RunState


Event = (
    InstanceJoined
    | InstanceLost
    | InstanceLeaving
    | InstanceReported
    | GroupSubmitted
    | RequestSubmitted
    | RequestWithdrawn
    | SessionEnded
    | SubmissionsClosed
    | TokensArrived
    | RequestFinished
    | TurnFinished
    | ToolReturned
    | TrajectoryEnded
    | RequestInterrupted
    | RequestFailed
    | WeightsPublished
    | InstancePaused
    | WeightsUpdated
    | InstanceReturned
    | BatchRequested
    | Woke
    | PrefixVerified
    | Restored
    | GateClosed
    | GateOpened
    | Retuned
    | GroupJudged
)
