"""Checks at submission that a prompt can be generated at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.config import nearest
from rollout_sched.core.errors import CallerError
from rollout_sched.live.draft_test import untestable
from rollout_sched.live.samples import Prompt

#: Fields of vLLM 0.32's SamplingParams that a caller may set. An endpoint would ignore any other
#: field, or refuse it only when the prompt is dispatched.
SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "routed_experts_prompt_start",
        "seed",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "trace_decode_token_ids",
        "watermarking",
    }
)

#: SamplingParams that are fields of Prompt instead.
_OURS = {"n": "Prompt.samples", "max_tokens": "Prompt.max_tokens"}


def check_prompt(prompt: Prompt, *, max_model_len: int, turns: bool, verified: bool) -> None:
    """Raises CallerError with the group, the error and the remedy.

    max_model_len  tokens of prompt and response that every instance accepts; 0 if unknown
    turns          a tool answers its turns: the response ends when there is no more room
    verified       its old tokens may be verified (see `core.verification`)
    """
    wrong = _length(prompt, max_model_len, turns)
    for index in range(max(1, len(prompt.each))):
        wrong = wrong or _sampling(prompt.sampling_of(index), verified)
    if wrong:
        raise CallerError(f"group {prompt.uid!r}: {wrong}")


def _length(prompt: Prompt, most: int, turns: bool) -> str:
    asked, room = len(prompt.prompt_ids), most - len(prompt.prompt_ids)
    if not most or room >= (1 if turns else prompt.max_tokens):
        return ""
    if room < 1:
        return f"its prompt of {asked} tokens leaves no room in max_model_len, {most}; shorten it"
    return (
        f"prompt_ids and max_tokens are {asked} + {prompt.max_tokens} tokens, and the instances' "
        f"max_model_len is {most}; max_tokens can be {room}"
    )


def _sampling(sampling: Mapping[str, Any], verified: bool) -> str:
    for name in sampling:
        if name in _OURS:
            return f"sampling: {name} is not allowed there; set {_OURS[name]}"
        if name not in SAMPLING:
            return f"sampling: vLLM has no parameter {name!r}{nearest(str(name), SAMPLING)}"
    if verified and (problem := untestable(sampling)):
        return f'sampling: {problem}; or set interruption.kv to "recompute" (no verification)'
    return ""
