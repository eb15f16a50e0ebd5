"""Verified resume over sockets: whatever happens, a sample is what its versions would have said."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler, Sample
from rollout_sched.core.model.events import PrefixVerified
from rollout_sched.simulators.fake_instance import tokens as text
from tests.integrations.faults.fleet import GREEDY, House, events, house, logprobs, reasons
from tests.integrations.gateway.house import run
from tests.integrations.gateway.test_fleet import checkpoint

DRIFT = 0.01
TOKENS = 250
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(8)]
ASYNC = """
[batching]
use = "fully_async"
[freshness]
use = "bounded"
max_staleness = 3
[interruption]
use = "partial"
kv = "verify"
"""
ROUNDS = """
[batching]
use = "sync"
over_prompts = 2.0
[interruption]
use = "partial"
kv = "verify"
[weights]
use = "all_at_once"
when = "between_batches"
"""


def assert_whole(samples: list[Sample]) -> None:
    """Every token, verified or made, is what its version says in that place."""
    assert sorted((s.uid, s.index) for s in samples) == [
        (f"g{n}", index) for n in range(len(PROMPTS)) for index in range(2)
    ]
    for sample in samples:
        prompt = PROMPTS[int(sample.uid[1:])]
        spans = [(span.version, span.end - span.start) for span in sample.segments]
        name = text.name(text.read(prompt))
        assert sample.response_ids == text.tokens(name, 0, spans, DRIFT)
        assert len(sample.response_ids) == TOKENS + 20 * int(sample.uid[1:])
        assert sample.rollout_log_probs == logprobs(prompt, len(sample.response_ids))


async def train(the: House, folder: Path, *, batches: int, fault: str = "") -> list[Sample]:
    """Everything, with new weights after each batch; the first ones while all are under way."""
    samples: list[Sample] = []
    async with RolloutScheduler.connect(the.url) as rollouts:
        sampling = {**GREEDY, "logprobs": 0}
        await rollouts.submit(
            Prompt(f"g{n}", ids, 2, TOKENS + 20 * n, sampling) for n, ids in enumerate(PROMPTS)
        )
        await rollouts.close_submissions()
        version = 0
        if batches == 1:
            first = asyncio.create_task(rollouts.next_batch())
            await asyncio.sleep(0.6)
            assert not first.done()
            if fault:
                the.strike(0, fault, times=2, seconds=0.2)
            version += 1
            checkpoint(folder / f"v{version}")
            await rollouts.publish_weights(version, Reload(str(folder / "v{version}")))
            batch = await first
            assert batch is not None
            return batch.samples
        async for batch in rollouts.batches():
            samples += batch.samples
            version += 1
            checkpoint(folder / f"v{version}")
            if fault:
                the.strike(0, fault, times=2, seconds=0.2)
            await rollouts.publish_weights(version, Reload(str(folder / "v{version}")))
    return samples


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_interrupted_goes_on_as_the_new_weights_would(
    tmp_path: Path, streamed: bool
) -> None:
    async def scene() -> None:
        every = 5 * streamed
        async with house(
            tmp_path, policy=ASYNC, stream_every=every, prompts_per_step=8, drift=DRIFT, speed=100.0
        ) as the:
            samples = await train(the, tmp_path, batches=1)
            assert the.anomalies == {}
            assert_whole(samples)
            assert {v for s in samples for v in s.versions} == {1}
            assert any(s.drawn_log_probs is not None for s in samples)

    run(scene())
    verified = [e.tokens for e in events(tmp_path) if isinstance(e, PrefixVerified)]
    assert len(verified) >= 16
    assert any(verified)
    assert reasons(tmp_path) == []


def test_what_is_set_back_is_on_policy_in_the_next_round(tmp_path: Path) -> None:
    async def scene() -> None:
        async with house(
            tmp_path, policy=ROUNDS, prompts_per_step=2, drift=DRIFT, speed=300.0
        ) as the:
            samples = await train(the, tmp_path, batches=4)
            assert the.anomalies == {}
            assert_whole(samples)
            assert {sample.staleness for sample in samples} == {0}
            assert any(span.verified for sample in samples for span in sample.segments)

    run(scene())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("short_prompt", "log-probs for a prompt of"),
        ("garbage", "is not valid"),
        ("silent", "never answered|given up"),
        ("cut", "closed in the middle|closed before"),
        ("error_500", "500"),
    ],
)
def test_a_fault_while_drafts_are_verified(tmp_path: Path, fault: str, says: str) -> None:
    async def scene() -> None:
        async with house(
            tmp_path, policy=ASYNC, prompts_per_step=8, drift=DRIFT, speed=100.0
        ) as the:
            samples = await train(the, tmp_path, batches=1, fault=fault)
            assert_whole(samples)
            assert not the.driver.pump.scheduler.work.requests
            assert the.anomalies == {}

    run(scene())
    assert any(re.search(says, reason) for reason in reasons(tmp_path)), reasons(tmp_path)
