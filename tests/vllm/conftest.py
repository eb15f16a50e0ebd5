"""Real vLLM on a CPU: the settings it needs, two tiny models and one engine.

The settings are read when vllm is imported, so they stand here, before any test module is.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine core lives in this process
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
    VLLM_CPU_OMP_THREADS_BIND="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",  # else the first sampling compiles for many seconds
)

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one tiny random model."""
    folder = tmp_path_factory.mktemp("models")
    write = runpy.run_path(str(Path(__file__).with_name("tiny_model.py")))["main"]
    paths = [folder / "tiny-0", folder / "tiny-1"]
    for seed, path in enumerate(paths):
        write([str(path), "--seed", str(seed)])
    return paths


@pytest.fixture(scope="session")
def engine(models: list[Path]) -> Any:
    """An LLMEngine with room for any test; its scheduler is replaced by each."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=str(models[0]),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=1024,
        block_size=32,  # attention on CPU takes multiples of 32 only
        kv_cache_memory_bytes=16 * 2**20,
        distributed_executor_backend="uni",
    )
    return LLMEngine.from_engine_args(arguments)
