"""The paths of vLLM's HTTP server (vLLM 0.32)."""

from __future__ import annotations

from typing import Literal

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

MODELS = "/v1/models"
METRICS = "/metrics"
VERSION = "/version"

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
UPDATE_WEIGHTS = "update_weights"
FINISH_UPDATE = "finish_weight_update"
