"""Where vLLM's HTTP server answers (vLLM 0.32), and which of its control an SGLang user knows."""

from __future__ import annotations

from typing import Literal

#: What is spoken on a path that generates.
Endpoint = Literal["completions", "chat", "generate"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"  # only with --enable-scale-out

#: What generates, by its path.
ENDPOINTS: dict[bytes, Endpoint] = {
    COMPLETIONS.encode(): "completions",
    CHAT.encode(): "chat",
    GENERATE.encode(): "generate",
}

MODELS = "/v1/models"
METRICS = "/metrics"
VERSION = "/version"

#: Abort by id: the one with --enable-scale-out, and that of the development mode.
OPEN_ABORT = "/inference/v1/abort_requests"
DEV_ABORT = "/abort_requests"

#: Only in the development mode (VLLM_SERVER_DEV_MODE=1).
SERVER_INFO = "/server_info?config_format=json"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
SET_LABEL = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
COLLECTIVE_RPC = "/collective_rpc"

#: Steps of a weight transfer: an endpoint each, and a method of the engine in process.
INIT_TRANSFER = "init_weight_transfer_engine"
START_UPDATE = "start_weight_update"
UPDATE_WEIGHTS = "update_weights"
FINISH_UPDATE = "finish_weight_update"

#: Paths of vLLM's, and SGLang's, control that concern every instance of a fleet.
CONTROL_PATHS = frozenset(
    (
        "/abort_request",
        "/continue_generation",
        "/flush_cache",
        "/is_sleeping",
        "/pause_generation",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume_kv_cache_memory",
        "/sleep",
        "/start_profile",
        "/stop_profile",
        "/update_weights_from_disk",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
        COLLECTIVE_RPC,
        DEV_ABORT,
        IS_PAUSED,
        OPEN_ABORT,
        PAUSE,
        RESUME,
        SET_LABEL,
        WEIGHT_INFO,
        f"/{FINISH_UPDATE}",
        f"/{INIT_TRANSFER}",
        f"/{START_UPDATE}",
        f"/{UPDATE_WEIGHTS}",
    )
)

#: After these an instance makes no tokens, until one of those that undo it.
HOLDING = frozenset((PAUSE, "/pause_generation", "/sleep"))
RELEASING = frozenset((RESUME, "/continue_generation", "/wake_up"))
