"""Real vLLM servers on loopback, with the log of those that fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT_S = 180.0
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 2048
KV_TOKENS = 16384  # of the tiny model in float32, at 1 KiB a token
BLOCK_SIZE = 32


@contextmanager
def serving(
    model: Path, folder: Path, *flags: str, dev_mode: bool, core: int, **environment: str
) -> Iterator[str]:
    """The URL of a new server of `model`; its log is in `folder`, and shown if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_TOKENS * 1024)]
    environment |= {"VLLM_SERVER_DEV_MODE": str(int(dev_mode))}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1))}
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"vLLM did not start; the end of its log:\n{log.read_text()[-4000:]}")
