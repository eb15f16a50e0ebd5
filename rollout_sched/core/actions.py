"""Actions: what the scheduler orders. Imperative; a driver carries them out in this order."""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout_sched.core.events import Spans
from rollout_sched.core.samples import DeliveredSample


class _Action(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


class Dispatch(_Action, frozen=True):
    """Send a request to an instance: `context_tokens` in, at most `max_new_tokens` out.

    `salt` names the prefix cache it may read and fill (vLLM's `cache_salt`): the current version
    for fresh KV, an older one to go on from KV made under that version. `response_tokens` of the
    context were generated in earlier attempts, `computed_tokens` went through an instance before;
    `turn` counts the turns of a trajectory that are over. `group` and `index` say which sample of
    which group it is; "" for a direct request.

    `draft` are the leading response tokens, as (version, tokens) pairs in order, that are to be
    verified first: a PrefixVerified comes before anything else of the attempt. What is rejected may
    be made anew beyond `max_new_tokens`. `ends`: the draft is a whole response; if all of it has
    passed, a RequestFinished follows at once.
    """

    request: str
    attempt: int
    instance: str
    context_tokens: int
    max_new_tokens: int
    salt: int
    response_tokens: int = 0
    computed_tokens: int = 0
    turn: int = 0
    group: str = ""
    index: int = 0
    draft: Spans = ()
    ends: bool = False


class Interrupt(_Action, frozen=True):
    """Stop an attempt; its answer is a RequestInterrupted, or a RequestFinished that was faster."""

    request: str
    attempt: int
    instance: str


class Pause(_Action, frozen=True):
    """Stop an instance. "keep": its requests freeze; "abort": they come back interrupted."""

    instance: str
    mode: Literal["keep", "abort"]
    clear_cache: bool


class UpdateWeights(_Action, frozen=True):
    """Load `version` into an instance."""

    instance: str
    version: int


class Resume(_Action, frozen=True):
    """Let a paused instance go on."""

    instance: str


class Release(_Action, frozen=True):
    """An instance that was leaving has finished what it had: let it go."""

    instance: str


class Lend(_Action, frozen=True):
    """Stop an instance, which holds no work: the trainer may have its GPUs until it gives them
    back, which is an InstanceReturned. Its KV cache is not needed any more."""

    instance: str


class Reclaim(_Action, frozen=True):
    """What was lent is needed again: the trainer is to give it back."""

    instance: str


class Judge(_Action, frozen=True):
    """Say whether a group is to be trained, that is whole and was submitted to be judged: the
    answer is a GroupJudged with the same number. It holds no slot meanwhile. Asked anew, by another
    number, after a restart, and where it became whole again after it had started over."""

    group: str
    judgement: int
    samples: tuple[DeliveredSample, ...]


class Deliver(_Action, frozen=True):
    """Hand a batch, or one more part of it, to the trainer: whole groups, oldest first.

    `version` is the trainer's, the same for all parts of a batch. `part` counts them from 0; the
    `last` one makes the batch whole. It has no samples where what was missing will never come.
    `missing` groups are what the last one is short of, for no more are coming.
    """

    batch: int
    version: int
    samples: tuple[DeliveredSample, ...]
    part: int = 0
    last: bool = True
    missing: int = 0


class Answer(_Action, frozen=True):
    """Hand a response to the client that waits for it (see RequestSubmitted)."""

    sample: DeliveredSample


class Discard(_Action, frozen=True):
    """Throw away the `tokens` a request has made. `ends`: the request itself is over.

    `attempt`: only what that attempt made; 0: everything kept so far, but of "rejected" the last
    `tokens` that were generated, or everything where a tool has answered one of those.
    Reasons: "rejected" (newer weights do not pass it), "surplus" (more samples than the group
    needs), "deferred" (set back to a later round), "stale" (older than allowed), "untrue" (it
    cannot be what it says), "oversized" (no instance that was ever here can hold it), "filtered"
    (judged, and not to be trained), "failed", "withdrawn".
    """

    request: str
    tokens: int
    reason: str
    ends: bool = False
    attempt: int = 0
    group: str = ""
    index: int = 0


class Wake(_Action, frozen=True):
    """Send a Woke at the time `at`, in seconds of the driver's clock."""

    at: float


Action = (
    Dispatch
    | Interrupt
    | Pause
    | UpdateWeights
    | Resume
    | Release
    | Lend
    | Reclaim
    | Judge
    | Deliver
    | Answer
    | Discard
    | Wake
)
