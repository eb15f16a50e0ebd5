"""The inputs and outcomes of a simulated instance."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple, get_args

import msgspec

Reason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]


class SimRequest(msgspec.Struct, gc=False):
    """One attempt as an instance receives it. All lengths in tokens.

    attempt         its unique number
    context_tokens  what must be in the KV cache first: prompt, earlier tokens, observations
    new_tokens      how many it generates before it ends by itself, >= 1
    max_new_tokens  how many it may generate, >= 1
    prompt_stream   names the text of the first shared_tokens tokens (a group's prompt)
    stream          names the text after those: that of one request, growing over its attempts. A
                    request that starts over needs another name, because its text is another.
    known_tokens    leading context tokens that an earlier attempt has computed already; they only
                    separate prefill from re-prefill in the counters
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
    """An attempt has ended.

    tokens  new tokens of this attempt
    spans   (version, tokens) in order; their sum is tokens
    reason  stop: made all its new_tokens; length: stopped earlier by a limit; abort
    at      time in seconds
    """

    attempt: int
    tokens: int
    spans: tuple[tuple[int, int], ...]
    reason: Reason
    at: float


class Paused(msgspec.Struct):
    """A pause is complete: nothing happens until resume.

    at  time in seconds
    """

    mode: PauseMode
    at: float


Outcome = Ended | Paused


class SimGauges(NamedTuple):
    """The gauges that an instance reports, as of the last call of `advance`.

    waiting   queued and preempted attempts. Those that take effect at the next boundary are not
              counted; nor does vLLM count them, and its /metrics freeze during a pause.
    kv_usage  fraction of the KV blocks in use, 0 to 1
    steps     engine steps completed
    busy_s    seconds spent in steps, including the part of the step in progress
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
    """Raises ValueError for a mode that vLLM does not have."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode must be keep, abort or wait, got {mode!r}")
