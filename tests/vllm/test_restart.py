"""A gateway before real vLLM that is killed in the middle of a batch, and one that goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rollout_sched.client import Prompt, RolloutScheduler
from tests.neighbours.fleet import gateway
from tests.vllm import servers

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
TOKENS = 400
LIMIT_S = 300
DICE = random.Random(11)
PROMPTS = [
    Prompt(f"p{n}", [DICE.randrange(3, 2000) for _ in range(60)], 1, TOKENS, GREEDY)
    for n in range(4)
]
SERVE = ["--prompts-per-step", f"{len(PROMPTS)}", "--stream-every", "8"]


def test_kill_9_in_the_middle_of_a_batch(models: list[Path], tmp_path: Path) -> None:
    """The same command takes up the run, its trainer gets its batch whole, and the tokens are those
    of a run that nobody disturbed."""
    with ExitStack() as stack:
        server = stack.enter_context(
            servers.serving(models[0], tmp_path, "--enable-scale-out", dev_mode=True, core=0)
        )
        urls = [server.wait()]
        with gateway(urls, *SERVE, policy="partial_rollout") as undisturbed:
            wanted = asyncio.run(_batch(undisturbed.url))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [*SERVE, "--port", f"{port}", "--store", f"{tmp_path}/store"]
        killed = stack.enter_context(gateway(urls, *command, policy="partial_rollout"))

        def restart() -> None:
            os.kill(killed.pid, signal.SIGKILL)
            stack.enter_context(gateway(urls, *command, policy="partial_rollout"))

        made = asyncio.run(_batch(killed.url, restart))
    assert made == wanted


async def _batch(
    url: str, restart: Callable[[], None] | None = None
) -> dict[str, tuple[list[int], int]]:
    """Tokens by prompt, and how many have log-probs; with `restart` once some are stored."""
    async with asyncio.timeout(LIMIT_S), RolloutScheduler.connect(url) as rollouts:
        await rollouts.submit(PROMPTS)
        asking = asyncio.create_task(rollouts.next_batch())
        if restart is not None:
            while (await rollouts.state())["store"]["live_bytes"] < len(PROMPTS) * TOKENS:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(restart)
            assert (await rollouts.state())["store"]["epoch"] == 2
        batch = await asking
        assert batch is not None
        assert not batch.failed
        return {
            sample.uid: (sample.response_ids, len(sample.rollout_log_probs or ()))
            for sample in batch.samples
        }
