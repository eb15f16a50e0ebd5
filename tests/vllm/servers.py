"""Real vLLM servers on loopback."""

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

START_LIMIT_S = 300.0
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 2048
KV_TOKENS = 16384  # of the tiny model in float32, at 1 KiB a token
BLOCK_SIZE = 32

#: One process beside the API's, for both share few cores with the client: a third would spin on the
#: core of the others while it waits. And nothing is compiled when the first request comes.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """A vLLM process: where it answers, once it does."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self._log = log

    def wait(self) -> str:
        """Its URL, when it is healthy; RuntimeError with its log if it does not become so."""
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self.url
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"vLLM did not start; its log ends:\n{self._log.read_text()[-4000:]}")


def chunked(tokens: int) -> str:
    """A policy that cuts every response after so many tokens, and goes on with it elsewhere."""
    return f"""
[batching]
use = "fully_async"
[freshness]
use = "unbounded"
[routing]
use = "round_robin"
[interruption]
use = "partial"
at_update = "resubmit"
segment_tokens = {tokens}
segment = "chunk"
"""


@contextmanager
def serving(
    model: Path,
    folder: Path,
    *flags: str,
    dev_mode: bool,
    core: int,
    port: int = 0,
    **environment: str,
) -> Iterator[Server]:
    """A new server of `model`, still starting; its log is in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = port or probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_TOKENS * 1024)]
    environment |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": str(int(dev_mode))}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1))}
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
