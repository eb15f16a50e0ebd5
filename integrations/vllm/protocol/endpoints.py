"""The paths of vLLM's HTTP server (vLLM 0.32 and 0.33)."""

from __future__ import annotations

import re
from typing import Any, Literal

#: The request format of a path that generates.
Endpoint = Literal["completions", "chat", "generate"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"  # only with --enable-scale-out

#: The endpoints that generate, by path.
ENDPOINTS: dict[bytes, Endpoint] = {
    COMPLETIONS.encode(): "completions",
    CHAT.encode(): "chat",
    GENERATE.encode(): "generate",
}

#: With this field, completions and chats report which weights made which tokens (vLLM 0.33).
ASK_VERSIONS = "return_weight_versions"

MODELS = "/v1/models"
METRICS = "/metrics"
VERSION = "/version"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

#: Abort by id: with --enable-scale-out, and in development mode.
OPEN_ABORT = "/inference/v1/abort_requests"
DEV_ABORT = "/abort_requests"

#: Only in development mode (VLLM_SERVER_DEV_MODE=1).
SERVER_INFO = "/server_info?config_format=json"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
SET_LABEL = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
COLLECTIVE_RPC = "/collective_rpc"
WORLD_SIZE = "/get_world_size"

#: Steps of a weight transfer: each is an endpoint, and a method of the in-process engine.
INIT_TRANSFER = "init_weight_transfer_engine"
START_UPDATE = "start_weight_update"
START_DRAFT_UPDATE = "start_draft_weight_update"  # of the model that drafts tokens
UPDATE_WEIGHTS = "update_weights"
FINISH_UPDATE = "finish_weight_update"


# ------------------------------------------------------------------------------------------
# vLLM's ids of requests, which it makes from the ids that it is given.
#
# The id is given in the X-Request-Id header, or as `request_id` in the body. vLLM's own id is in
# the answer, and an abort must name it.

#: The engine's id for a call with one prompt (vLLM 0.32).
_ENGINE_ID: dict[Endpoint, str] = {
    "completions": "cmpl-%s-0",
    "chat": "chatcmpl-%s",
    "generate": "generate-tokens-%s",
}


def engine_id(endpoint: Endpoint, request_id: str) -> str:
    """The engine's id of a request, which an abort must name."""
    return _ENGINE_ID[endpoint] % request_id


def names(told: str, order_id: str) -> bool | None:
    """Whether an answer's id is made from this of our orders (`<run>-<attempt>`), after which it
    may have the client's own request id. None: from none of them, as if a server numbers its
    answers itself.
    """
    run = order_id[: order_id.rfind("-") + 1]
    at = told.rfind(run) if run else -1
    if at < 0:
        return None
    named = told[at:]
    return named.startswith(order_id) and not named[len(order_id) :][:1].isdigit()


# ------------------------------------------------------------------------------------------
# The precision that an instance computes in, in one word for either engine.

_NOT_PRECISION = re.compile(r"^torch\.|[^\w.-]")


def precision(quantization: object, dtype: object, kv_dtype: object) -> str:
    """As in `live.ports.Description`, from what a server says of its configuration."""
    weights, kv = (
        _NOT_PRECISION.sub("", str(told or ""))[:40] for told in (quantization or dtype, kv_dtype)
    )
    return f"{weights}, kv {kv}" if weights and kv not in ("", "auto", weights) else weights


# ------------------------------------------------------------------------------------------
# vLLM's names for the metrics that show an instance's load.

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"  # from 0 to 1
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"  # these three only with speculative decoding
DRAFTED_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"

#: With the label `source`: where the KV of a prompt's tokens came from.
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
COMPUTED = "local_compute"
CACHED = "local_cache_hit"

#: One sample for each engine, all equal; its labels have the sizes.
CACHE_CONFIG = "vllm:cache_config_info"

#: Unix seconds; of Prometheus's client library, not vLLM's own.
STARTED_AT = "process_start_time_seconds"


# ------------------------------------------------------------------------------------------
# How vLLM's endpoints differ in the fields of a request (vLLM 0.32).

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
