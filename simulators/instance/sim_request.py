"""What a simulated instance is given, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple, get_args

import msgspec

from rollout_sched.simulators.instance.spec import InstanceSpec

Reason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]


class SimRequest(msgspec.Struct, gc=False):
    """One attempt as an instance receives it. All lengths in tokens.

    attempt         its unique number
    context_tokens  what must be in the KV cache first: prompt, earlier tokens, observations
    new_tokens      how many it would generate before it ends by itself, >= 1
    max_new_tokens  how many it may generate, >= 1
    prompt_stream   names the text of the first shared_tokens tokens (a group's prompt)
    stream          names the text after those: one request's own, growing over its attempts. A
                    request that is generated anew needs another name, for its text is another.
    known_tokens    leading context tokens that some earlier attempt has computed already; they
                    only separate prefill from re-prefill in the counters
    salt            prefix-cache namespace: no hits across different salts
    priority        lower is more urgent; ignored with fcfs
    """

    attempt: int
    context_tokens: int
    new_tokens: int
    max_new_tokens: int
    prompt_stream: Hashable
    shared_tokens: int
    stream: Hashable
    known_tokens: int = 0
    salt: Hashable = 0
    priority: int = 0


class Ended(msgspec.Struct, gc=False):
    """An attempt is over.

    tokens  new tokens of this attempt
    spans   (version, tokens) in order; they sum up to tokens
    reason  stop: made all its new_tokens; length: stopped by a limit before; abort
    at      when, in seconds
    """

    attempt: int
    tokens: int
    spans: tuple[tuple[int, int], ...]
    reason: Reason
    at: float


class Paused(msgspec.Struct):
    """A pause is complete: nothing happens until resume.

    at  when, in seconds
    """

    mode: PauseMode
    at: float


Outcome = Ended | Paused


class Counters(msgspec.Struct):
    """What an instance has done since it started.

    prefill_tokens      context tokens computed, re-prefill included
    cached_tokens       context tokens found in the prefix cache instead
    reprefilled_tokens  those of prefill_tokens that had been computed before: preempted or resumed
    """

    admissions: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    reprefilled_tokens: int = 0
    generated_tokens: int = 0


class SimGauges(NamedTuple):
    """What an instance shows of itself, as of the last call of `advance`.

    waiting   queued and preempted ones. What is still on its way to the next boundary is not
              counted; nor does vLLM, whose /metrics moreover stand still during a pause.
    kv_usage  fraction of the KV blocks that is in use, 0 to 1
    steps     engine steps completed
    busy_s    seconds spent in steps, so far in the one under way
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_usage: float
    preemptions: int
    prefill_tokens: int
    cached_tokens: int
    reprefilled_tokens: int
    generated_tokens: int
    steps: int
    busy_s: float


def check_pause_mode(mode: str) -> None:
    """Raises ValueError for one that vLLM does not know."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode must be keep, abort or wait, got {mode!r}")


def last_token(request: SimRequest, spec: InstanceSpec) -> tuple[int, Reason]:
    """Tokens at the end of a request and why it ends there. Raises ValueError, naming the limit,
    if it can never run."""
    context = request.context_tokens
    if context < 1 or request.new_tokens < 1 or request.max_new_tokens < 1:
        raise ValueError(
            f"attempt {request.attempt}: context_tokens ({context}), new_tokens "
            f"({request.new_tokens}) and max_new_tokens ({request.max_new_tokens}) must be >= 1"
        )
    if not (0 <= request.shared_tokens <= context and 0 <= request.known_tokens <= context):
        raise ValueError(
            f"attempt {request.attempt}: shared_tokens ({request.shared_tokens}) and known_tokens "
            f"({request.known_tokens}) must lie within context_tokens ({context})"
        )
    if context >= spec.max_model_len:
        raise ValueError(
            f"attempt {request.attempt}: a context of {context} tokens leaves none for a new one "
            f"within max_model_len {spec.max_model_len}; raise max_model_len or cut the context"
        )
    new = min(request.new_tokens, request.max_new_tokens, spec.max_model_len - context)
    blocks = -(-(context + new - 1) // spec.block_size)  # the last token's KV is never written
    if blocks > spec.kv_blocks:
        raise ValueError(
            f"attempt {request.attempt}: {context} + {new} tokens need {blocks} blocks of "
            f"{spec.block_size}, but the instance has {spec.kv_blocks}; raise kv_blocks or lower "
            f"max_new_tokens"
        )
    return context + new, "stop" if new == request.new_tokens else "length"
