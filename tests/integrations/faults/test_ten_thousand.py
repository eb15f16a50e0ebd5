"""Ten thousand requests through the gateway, one answer in a hundred faulty: every one arrives."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import msgspec

from rollout_sched.core.model.events import InstanceLost, RequestFailed
from rollout_sched.integrations.http import Pool
from rollout_sched.live.settings import Settings
from rollout_sched.simulators.fake_instance.engine import Kind
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec
from tests.integrations.faults.fleet import GREEDY, events, house, response
from tests.virtual_net import run

REQUESTS = 10_000
AT_ONCE = 256
JSON = ((b"content-type", b"application/json"),)
FAULTS: tuple[Kind, ...] = (
    *("silent", "garbage", "twice", "wrong_version", "reset", "cut", "slow"),
    *("error_500", "error_503"),
)
#: A step takes a simulated second, as everywhere in these tests, but has room for more.
SPEC = InstanceSpec(
    cost=CostModel(step_s=1.0, weights_s=0.0, token_s=0.0),
    kv_blocks=10_000,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=2000,
)
SETTINGS = Settings(poll_s=0.1, misses=3, forgotten_s=1.0, abort_timeout_s=2.0)
POLICY = '[batching]\nuse = "fully_async"\n[interruption]\nuse = "partial"\n'


class _Answers(msgspec.Struct):
    class Choice(msgspec.Struct):
        token_ids: list[int]
        finish_reason: str

    choices: list[Choice]


def test_ten_thousand(tmp_path: Path) -> None:
    counted: Counter[str] = Counter()
    turns = asyncio.Semaphore(AT_ONCE)

    async def scene() -> None:
        rng = random.Random(5)
        prompts = [[rng.randrange(1000) for _ in range(8)] + [n] for n in range(REQUESTS)]
        lengths = [rng.randrange(1, 40) for _ in range(REQUESTS)]
        async with house(
            tmp_path, 4, policy=POLICY, settings=SETTINGS, spec=SPEC, speed=2000.0
        ) as the:
            for number in range(len(the.servers)):
                for fault in FAULTS:
                    the.strike(number, fault, probability=0.01 / len(FAULTS), seconds=0.2)
                # A restart takes everything with it that runs there, so one each will do.
                the.strike(number, "restart", probability=0.001, seconds=0.5, times=1)
            pool = Pool(the.url)
            try:
                await asyncio.gather(
                    *(ask(pool, p, t) for p, t in zip(prompts, lengths, strict=True))
                )
            finally:
                pool.close()
            assert pool.unasked == 0
            assert not the.driver.pump.scheduler.parts.requests
            counters = the.service.gateway.figures.counters
            assert counters.outcomes == {"answered": REQUESTS}
            assert counters.tokens["answered"] == sum(lengths)
            for server in the.servers:
                counted.update({f.fault: f.struck for f in server.switchboard.faults.values()})

    async def ask(pool: Pool, prompt: list[int], tokens: int) -> None:
        body = {"token_ids": prompt, "sampling_params": {**GREEDY, "max_tokens": tokens}}
        data = msgspec.json.encode(body)
        async with turns:
            answer = await pool.request("POST", "/inference/v1/generate", JSON, data)
        assert answer.status == 200, answer.body
        (choice,) = msgspec.json.decode(answer.body, type=_Answers).choices
        assert choice.finish_reason == "length"
        assert choice.token_ids == response(prompt, [(0, tokens)]), answer.body[-300:]

    run(scene())
    assert counted.total() > 50
    assert all(counted[fault] for fault in FAULTS), counted
    kinds = Counter(type(event) for event in events(tmp_path))
    assert kinds[InstanceLost] >= 1
    assert kinds[RequestFailed] > counted["silent"] + counted["garbage"] + counted["error_500"]
