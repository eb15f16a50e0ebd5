"""One client floods the gateway: the others and the trainer get what they got without it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched import policies
from rollout_sched.client import Prompt, RolloutScheduler
from rollout_sched.core.state.waiting import BESIDE_S
from rollout_sched.integrations.http import Pool
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec
from tests.integrations.faults.fleet import GREEDY, SETTINGS, House, house
from tests.virtual_net import run

TOKEN_S = 0.01
SLOTS = 32
SPEC = InstanceSpec(
    cost=CostModel(step_s=1.0, weights_s=0.0, token_s=0.0),
    kv_blocks=10_000,
    block_size=16,
    max_num_seqs=SLOTS,
    max_num_batched_tokens=8192,
    max_model_len=2000,
)
PRESETS = Path(policies.__file__).parent / "presets"
POLICIES = ["dplb", "partial_rollout", "best_on_policy"]


class Caller:
    """A client with a key; `ask` returns the status of the answer and the seconds it took."""

    def __init__(self, the: House, key: str) -> None:
        self.statuses: Counter[int] = Counter()
        self._pool = Pool(the.url)
        self._lines = (
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {key}".encode()),
        )

    async def ask(self, tokens: int, **other: Any) -> float:
        body = {"token_ids": [1, 2, 3], "sampling_params": {**GREEDY, "max_tokens": tokens}}
        data = msgspec.json.encode(body | other)
        begun = asyncio.get_running_loop().time()
        answer = await self._pool.request("POST", "/inference/v1/generate", self._lines, data)
        self.statuses[answer.status] += 1
        if answer.status == 429:
            retry = dict(answer.headers)[b"retry-after"]
            await asyncio.sleep(int(retry))
        return asyncio.get_running_loop().time() - begun

    async def flood(self, open: int, tokens: int) -> None:
        """Keep so many calls open."""

        async def again() -> None:
            while True:
                await self.ask(tokens)

        try:
            await asyncio.gather(*(again() for _ in range(open)))
        finally:
            self._pool.close()

    async def p99(self, calls: int, every_s: float = 0.0) -> float:
        """Of calls for one token, one after the other."""
        took = []
        for _ in range(calls):
            took.append(await self.ask(1))
            await asyncio.sleep(every_s)
        return sorted(took)[int(0.99 * calls)]


def scene(folder: Path, policy: str, kv_blocks: int = 10_000, **more: Any) -> Any:
    for name in ("client", "trainer"):
        (folder / name).write_text("flood\ninnocent\n" if name == "client" else "trainer\n")
    return house(
        folder,
        2,
        policy=(PRESETS / f"{policy}.toml").read_text(),
        spec=msgspec.structs.replace(SPEC, kv_blocks=kv_blocks),
        settings=msgspec.structs.replace(SETTINGS, poll_s=1.0),
        speed=1 / TOKEN_S,
        api_key_file=folder / "client",
        trainer_key_file=folder / "trainer",
        **more,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_blocks", [10_000, 1000])
def test_an_innocent_is_answered_as_fast_as_alone(
    policy: str, kv_blocks: int, tmp_path: Path
) -> None:
    """Whatever the flood has taken while it was alone: all slots, or more than the KV caches."""

    async def main() -> None:
        async with scene(tmp_path, policy, kv_blocks=kv_blocks) as the:
            innocent, flood = Caller(the, "innocent"), Caller(the, "flood")
            alone = await innocent.p99(50)
            await asyncio.sleep(BESIDE_S)
            flooding = asyncio.create_task(flood.flood(500, 1500))
            await asyncio.sleep(6.0)
            assert await innocent.p99(200, every_s=0.05) <= 3 * alone
            flooding.cancel()
            with suppress(asyncio.CancelledError):
                await flooding
            assert flood.statuses.keys() == {200}, "all slots but a few were kept busy"

    run(main())


def test_whoever_has_most_of_the_open_calls_is_refused_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, "partial_rollout", max_requests=160) as the:
            innocent, flood = Caller(the, "innocent"), Caller(the, "flood")
            flooding = asyncio.create_task(flood.flood(500, 200))
            await asyncio.sleep(1.0)
            await asyncio.gather(*(innocent.ask(1) for _ in range(5)))
            await asyncio.sleep(10.0)
            flooding.cancel()
            assert innocent.statuses == {200: 5}
            assert flood.statuses.keys() == {200, 429}

    run(main())


@pytest.mark.parametrize(
    ("policy", "tokens", "kv_blocks"),
    [("partial_rollout", 20, 10_000), *[(policy, 1500, 1000) for policy in POLICIES]],
)
def test_the_trainer_gets_its_batches(
    policy: str, tokens: int, kv_blocks: int, tmp_path: Path
) -> None:
    async def steps(rollouts: RolloutScheduler, first: int, count: int) -> float:
        """Seconds that `count` batches of 64 groups of 4 samples take, of 50 to 149 tokens."""
        begun = asyncio.get_running_loop().time()
        for step in range(first, first + count):
            await rollouts.submit(
                Prompt(
                    uid=f"{step}.{n}",
                    prompt_ids=[n + 1],
                    samples=4,
                    max_tokens=50 + 37 * n % 100,
                )
                for n in range(64)
            )
            batch = await rollouts.next_batch()
            assert batch is not None
            rollouts.acknowledge(batch.number)
        return asyncio.get_running_loop().time() - begun

    async def main() -> None:
        more = {"prompts_per_step": 64, "kv_blocks": kv_blocks}
        async with scene(tmp_path, policy, **more) as the:
            async with RolloutScheduler.connect(the.url, key="trainer") as rollouts:
                alone = await steps(rollouts, 0, 5)
                flood, innocent = Caller(the, "flood"), Caller(the, "innocent")
                flooding = asyncio.create_task(flood.flood(500, tokens))
                await asyncio.sleep(6.0)
                slowest = asyncio.create_task(innocent.p99(20, every_s=1.0))
                beside = await steps(rollouts, 5, 5)
                assert await slowest <= 1.0, "it gets one of the next slots that are free"
                flooding.cancel()
            assert beside <= 1.1 * alone
            assert flood.statuses[200] > 1000 // tokens, "it gets the rest"

    run(main())
