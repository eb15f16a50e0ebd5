"""Where vLLM's HTTP server answers (vLLM 0.32)."""

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
WORLD_SIZE = "/get_world_size"

#: Steps of a weight transfer: an endpoint each, and a method of the engine in process.
INIT_TRANSFER = "init_weight_transfer_engine"
START_UPDATE = "start_weight_update"
UPDATE_WEIGHTS = "update_weights"
FINISH_UPDATE = "finish_weight_update"
