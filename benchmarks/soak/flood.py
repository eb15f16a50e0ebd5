"""One client that keeps far more calls open than there are slots, and a trainer beside it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from benchmarks.live.processes import url
from benchmarks.soak.innocents import COMPLETIONS, MODEL
from benchmarks.soak.wire import Line, WireError, post
from rollout_sched.client import Prompt, RolloutScheduler

#: Calls that the flooding client keeps open: twice the slots.
OPEN = 1500
#: Tokens of each: some seconds at the instances' speed, so that they hold their slots for long.
TOKENS = 12_000

GROUPS, SAMPLES, RESPONSE_TOKENS = 16, 4, 400


@asynccontextmanager
async def flood(port: int, key: str, statuses: Counter[int]) -> AsyncIterator[None]:
    """Keep calls open, from a second before to the end, and count the answers."""
    body = {"model": MODEL, "prompt": "flood", "max_tokens": TOKENS, "ignore_eos": True}
    data = post(COMPLETIONS, body, f"authorization: Bearer {key}")

    async def again() -> None:
        while True:
            line: Line | None = None
            try:
                line = await Line.open(port)
                while line.keeps:
                    await line.send(data)
                    status = (await line.answer()).status
                    statuses[status] += 1
                    if status != 200:
                        await asyncio.sleep(1.0)
            except (WireError, OSError):
                statuses[0] += 1
                await asyncio.sleep(1.0)
            finally:
                if line is not None:
                    line.drop()

    flooding = asyncio.gather(*[again() for _ in range(OPEN)])
    try:
        await asyncio.sleep(1.0)
        yield
    finally:
        flooding.cancel()
        with suppress(asyncio.CancelledError):
            await flooding


class Trainer:
    """Takes batch after batch, trains on each for `train_s` seconds, and counts them."""

    def __init__(self, port: int, key: str, train_s: float = 0.0) -> None:
        self._url, self._key, self._train_s = url(port), key, train_s
        self._numbers = itertools.count()

    async def batches(self, seconds: float) -> float:
        """Batches per second over at least so many seconds, until one is complete."""
        clock = asyncio.get_running_loop().time
        taken, begun = 0, clock()
        async with RolloutScheduler.connect(self._url, key=self._key) as rollouts:
            while clock() < begun + seconds:
                step = next(self._numbers)
                await rollouts.submit(
                    Prompt(
                        uid=f"{step}.{n}",
                        prompt_ids=[n + 1, 7],
                        samples=SAMPLES,
                        max_tokens=RESPONSE_TOKENS,
                        sampling={"ignore_eos": True},
                    )
                    for n in range(GROUPS)
                )
                batch = await rollouts.next_batch()
                assert batch is not None
                rollouts.acknowledge(batch.number)
                taken += 1
                await asyncio.sleep(self._train_s)
        return taken / (clock() - begun)
