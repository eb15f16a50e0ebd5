"""How vLLM's endpoints differ in the fields of a request (vLLM 0.32)."""

from __future__ import annotations

from typing import Any

from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

#: The field with the prompt.
INPUT: dict[Endpoint, str] = {
    "completions": "prompt",
    "chat": "messages",
    "generate": "token_ids",
}

#: The limit of OpenAI's and vLLM's completions if the client sets none. With a limit of null, and
#: on the other endpoints, vLLM makes as many tokens as fit.
COMPLETIONS_MAX_TOKENS = 16

#: Values that `/v1/completions` would take from the model's generation_config.json if a request
#: does not set them; `/inference/v1/generate` uses these values, so both endpoints sample alike.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

#: SamplingParams that `/v1/completions` has no field for and would ignore.
UNKNOWN_TO_COMPLETIONS = frozenset(
    {
        "extra_args",
        "flat_logprobs",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "skip_reading_prefix_cache",
        "trace_decode_token_ids",
    }
)

#: Chat fields that completions do not know; the prompt's tokens already include their effect.
CHAT_ONLY = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)
