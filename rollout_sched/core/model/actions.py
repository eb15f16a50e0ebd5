"""Actions: the orders of the scheduler. A driver carries them out in the order returned."""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout_sched.core.model.records import Count, DeliveredSample, Serial, Size


class _Action(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


class Dispatch(_Action, frozen=True):
    """Send a request to an instance: `context_tokens` in, at most `max_new_tokens` out.

    `salt` names the prefix cache that the instance may read and fill (vLLM's `cache_salt`): the
    current version for fresh KV, an older one to continue from KV made under that version.
    `response_tokens` of the context were generated in earlier attempts, `computed_tokens` were
    already processed by an instance; `turn` counts the finished turns of a trajectory. `group` and
    `index` name the group and the sample within it; `group` is "" for a direct request.
    """

    request: str
    attempt: Serial
    instance: str
    context_tokens: Count
    max_new_tokens: Count
    salt: Serial
    response_tokens: Count = 0
    computed_tokens: Count = 0
    turn: Count = 0
    group: str = ""
    index: Count = 0


class Interrupt(_Action, frozen=True):
    """Stop an attempt. It answers RequestInterrupted, or RequestFinished if it finished first."""

    request: str
    attempt: Serial
    instance: str


class Pause(_Action, frozen=True):
    """Stop an instance. "keep" freezes its requests; "abort" returns them as interrupted."""

    instance: str
    mode: Literal["keep", "abort"]
    clear_cache: bool


class UpdateWeights(_Action, frozen=True):
    """Load `version` into an instance."""

    instance: str
    version: Serial


class Resume(_Action, frozen=True):
    """Let a paused instance continue."""

    instance: str


class Release(_Action, frozen=True):
    """A leaving instance has finished its attempts: let it go."""

    instance: str


class Lend(_Action, frozen=True):
    """Stop an instance that holds no work, and lend its GPUs to the trainer until the trainer
    returns it (InstanceReturned). Its KV cache is no longer needed."""

    instance: str


class Reclaim(_Action, frozen=True):
    """The scheduler needs a lent instance again: ask the trainer to return it."""

    instance: str


class Judge(_Action, frozen=True):
    """Ask whether a whole group that was submitted to be judged is to be trained.

    The answer is a GroupJudged with the same number. The group holds no slot meanwhile. After a
    restart, or when a group that started over is whole again, the scheduler asks again with a new
    number.
    """

    group: str
    judgement: Serial
    samples: tuple[DeliveredSample, ...]


class Deliver(_Action, frozen=True):
    """Hand a batch, or one more part of it, to the trainer: whole groups, oldest first.

    `version` is the trainer's, the same for all parts of a batch. `part` counts the parts from 0;
    the `last` part makes the batch whole. The last part has no samples if the missing groups will
    never come. `missing` is the number of groups that the last part lacks because no more come.
    """

    batch: Serial
    version: Serial
    samples: tuple[DeliveredSample, ...]
    part: Size = 0
    last: bool = True
    missing: Count = 0


class Answer(_Action, frozen=True):
    """Hand a response to the client that waits for it (see RequestSubmitted)."""

    sample: DeliveredSample


#: Reasons to end one sample while its group goes on; for any other reason the group is over.
OF_ONE_SAMPLE = ("surplus", "sample_failed")


class Discard(_Action, frozen=True):
    """Throw away `tokens` tokens of a request. `ends`: the request itself is over.

    `attempt`: throw away only the tokens of that attempt; 0: all tokens kept so far. Reasons:
    "surplus" (more samples than the group needs), "deferred" (set back to a later round), "stale"
    (older than allowed), "untrue" (the report cannot be true), "oversized" (no instance so far
    could hold the request), "filtered" (judged, and not to be trained), "not_resumable" (the
    attempt was cut, and its response cannot be resumed), "sample_failed" (its group is delivered
    without it), "failed", "withdrawn".
    """

    request: str
    tokens: Count
    reason: str
    ends: bool = False
    attempt: Serial = 0
    group: str = ""
    index: Count = 0


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
