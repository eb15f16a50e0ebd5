"""The settings that vLLM, TRL and their libraries read when they are imported."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCH_COMPILE_DISABLE="1",  # else the first sampling compiles for many seconds
)
