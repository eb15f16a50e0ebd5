"""The head node dies: running actors continue and lose nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rollout_sched.client import Applied, Batch, Prompt, RolloutScheduler
from tests.neighbours.fleet import Program
from tests.ray.conftest import GREEDY, PATIENCE_S
from tests.ray.headless import KEY
from tests.ray.test_fronts import answer

GROUPS, SAMPLES, TOKENS = 6, 2, 100


def prompts(step: int) -> list[Prompt]:
    return [Prompt(f"s{step}g{n}", [n + 1, 7, 9], SAMPLES, TOKENS, GREEDY) for n in range(GROUPS)]


def made(step: int, batch: Batch | None) -> dict[tuple[str, int], list[int]]:
    assert batch is not None
    assert not batch.failed
    came = Counter((sample.uid, sample.index) for sample in batch.samples)
    assert came == Counter((p.uid, i) for p in prompts(step) for i in range(SAMPLES))
    return {(s.uid.partition("g")[2], s.index): s.response_ids for s in batch.samples}


def test_what_is_up_goes_on_without_the_head(servers: list[Program], tmp_path: Path) -> None:
    async def scene(cluster: subprocess.Popen[str]) -> None:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        told = json.loads(await asyncio.to_thread(cluster.stdout.readline))
        async with RolloutScheduler.connect(told["scheduler"], key=KEY) as rollouts:
            await rollouts.submit(prompts(0))
            undisturbed = made(0, await rollouts.next_batch())
            await rollouts.publish_weights(1, Applied())
            calls = [asyncio.ensure_future(answer(u, max_tokens=TOKENS)) for u in told["fronts"]]
            await rollouts.submit(prompts(1))
            waiting = asyncio.ensure_future(rollouts.next_batch())
            while not (await rollouts.state())["requests"]["in_flight"]:
                await asyncio.sleep(0.02)
            print("die", file=cluster.stdin, flush=True)
            assert await asyncio.to_thread(cluster.stdout.readline) == "gone\n"
            assert made(1, await waiting) == undisturbed
            assert len(set(await asyncio.gather(*calls))) == 1
            # New requests are served as before.
            await rollouts.publish_weights(2, Applied())
            await rollouts.submit(prompts(2))
            made(2, await rollouts.next_batch())
            assert all([await answer(url) for url in told["fronts"]])

    command = [sys.executable, "-m", "tests.ray.headless", str(tmp_path)]
    with subprocess.Popen(
        command + [server.url for server in servers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        try:
            asyncio.run(asyncio.wait_for(scene(cluster), PATIENCE_S))
        finally:
            assert cluster.stdin is not None
            cluster.stdin.close()
            cluster.wait(60.0)
