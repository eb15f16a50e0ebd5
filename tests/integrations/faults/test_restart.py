"""A gateway that is killed in the middle of a batch, and one that goes on with its store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from rollout_sched.client import Batch, Prompt, RolloutScheduler
from tests.neighbours.fleet import fake_instance, gateway

STEP, SAMPLES, TOKENS = 3, 2, 500

#: Seconds that nothing here comes near to.
PATIENCE_S = 240

SERVE = ["--prompts-per-step", f"{STEP}", "--stream-every", "4"]


def prompts() -> list[Prompt]:
    sampling = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "min_tokens": TOKENS}
    return [Prompt(f"p{n}", [n + 1, 7, 9], SAMPLES, TOKENS, sampling) for n in range(2 * STEP)]


def tokens(batch: Batch) -> dict[tuple[str, int], list[int]]:
    return {(sample.uid, sample.index): sample.response_ids for sample in batch.samples}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_kill_9_in_the_middle_of_a_batch(tmp_path):
    """The same command takes up the run; its trainer, which only waits, sees a batch that is late.
    What is greedy is as if nothing had happened."""
    with ExitStack() as stack:
        servers = [stack.enter_context(fake_instance("--speed", "2")).url for _ in range(2)]
        with gateway(servers, *SERVE, policy="round_robin_sync") as undisturbed:
            wanted = asyncio.run(_undisturbed(undisturbed.url))
        port = free_port()
        command = [*SERVE, "--port", f"{port}", "--store", f"{tmp_path}/store"]
        killed = stack.enter_context(gateway(servers, *command, policy="round_robin_sync"))

        def restart() -> None:
            os.kill(killed.pid, signal.SIGKILL)
            stack.enter_context(gateway(servers, *command, policy="round_robin_sync"))

        made = asyncio.run(_disturbed(killed.url, tmp_path / "store", restart))
    assert made == wanted


async def _undisturbed(url: str) -> list[dict[tuple[str, int], list[int]]]:
    async with asyncio.timeout(PATIENCE_S), RolloutScheduler.connect(url) as rollouts:
        await rollouts.submit(prompts())
        await rollouts.close_submissions()
        return [tokens(batch) async for batch in rollouts.batches()]


async def _disturbed(url: str, store: Path, restart) -> list[dict[tuple[str, int], list[int]]]:
    batches = []
    async with asyncio.timeout(PATIENCE_S), RolloutScheduler.connect(url) as rollouts:
        await rollouts.submit(prompts())
        await rollouts.close_submissions()
        for number in range(2):
            asking = asyncio.create_task(rollouts.next_batch())
            if number == 0:
                await _until_begun(rollouts)
                await asyncio.to_thread(restart)
                await rollouts.submit(prompts()[STEP:])  # by a trainer that is not sure
            batch = await asking
            assert batch.number == number
            assert not batch.failed
            batches.append(tokens(batch))
        assert await rollouts.next_batch() is None
        state = await rollouts.state()
    assert state["store"]["epoch"] == 2
    assert state["groups"]["delivered"] == 2 * STEP
    assert state["store"]["live_bytes"] == 0
    return batches


async def _until_begun(rollouts: RolloutScheduler) -> None:
    """Some of the batch is in the store."""
    some = STEP * SAMPLES * TOKENS // 10 * 8
    while (await rollouts.state())["store"]["live_bytes"] < some:
        await asyncio.sleep(0.05)
