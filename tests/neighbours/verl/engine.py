"""verl's vLLM server without vLLM: its actor's methods and what it knows of its engine, in small
(verl 0.9.1, `vllm_async_server.py`)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

#: Tokens that it makes before it waits to be let go.
HALF = 5

SLOTS, KV_TOKENS, MAX_MODEL_LEN = 8, 4096, 512


@ray.remote(num_cpus=0)
class EngineServer:
    """Every request makes HALF tokens at once and the rest when the server is let go. A token is
    the number of the version that makes it."""

    def __init__(self) -> None:
        self.global_steps: int | None = None
        self.engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
                parallel_config=SimpleNamespace(data_parallel_size=1),
                cache_config=SimpleNamespace(num_gpu_blocks=KV_TOKENS // 16, block_size=16),
                model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            )
        )
        self._submission_paused = False
        self._resumed = asyncio.Event()
        self._go = asyncio.Event()
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> SimpleNamespace:
        """The fields of verl's TokenOutput, without the seconds that importing it takes."""
        if len(prompt_ids) >= MAX_MODEL_LEN:
            raise ValueError(f"Prompt length ({len(prompt_ids)}) leaves no room")
        while self._submission_paused:
            await self._resumed.wait()
        most, version = sampling_params["max_tokens"], self.global_steps
        aborted = self._aborts[request_id] = asyncio.Event()
        ends = [asyncio.ensure_future(event.wait()) for event in (aborted, self._go)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        del self._aborts[request_id]
        tokens = min(HALF, most) if aborted.is_set() else most
        return SimpleNamespace(
            token_ids=[version or 0] * tokens,
            log_probs=[-0.5] * tokens if sampling_params["logprobs"] else None,
            stop_reason="aborted" if aborted.is_set() else "completed",
            num_preempted=None,
            extra_fields={"global_steps": version},
        )

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> None:
        assert not reset_prefix_cache, "others have their KV there"
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def abort_all_requests(self) -> None:
        self._submission_paused = True
        self._resumed.clear()
        for aborted in self._aborts.values():
            aborted.set()

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def resume_generation(self) -> None:
        self._submission_paused = False
        self._resumed.set()

    async def let_go(self) -> None:
        """All requests end, those to come at once."""
        self._go.set()

    async def reset(self, global_steps: int) -> None:
        """As it was at its start, but with these weights."""
        self._go.clear()
        await self.resume_generation()
        await self.set_global_steps(global_steps)

    async def running(self) -> int:
        return len(self._aborts)
