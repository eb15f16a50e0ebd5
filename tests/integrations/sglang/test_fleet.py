"""A trainer's run on simulated SGLang servers, in steps whose weights come from disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.simulators.fake_instance.engine import Fault
from tests import virtual_net
from tests.integrations.faults.fleet import (
    GREEDY,
    POLICY,
    SETTINGS,
    house,
    logprobs,
    response,
)
from tests.integrations.gateway.test_fleet import checkpoint

PATIENT = msgspec.structs.replace(SETTINGS, stall_s=30.0)
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(24)]


@pytest.mark.parametrize(
    ("kv", "at_update", "stream_every"),
    [
        ("recompute", "resubmit", 4),
        ("retain", "resubmit", 0),
        ("recompute", "in_place", 0),
        ("retain", "in_place", 0),
    ],
)
def test_every_token_has_the_version_that_made_it(
    tmp_path: Path, kv: str, at_update: str, stream_every: int
) -> None:
    """The text of a simulated server tells which version made each token. One server restarts with
    its first weights, and gets the run's again."""
    checkpoint(tmp_path / "weights")
    policy = POLICY.replace('"recompute"', f'"{kv}"').replace('"resubmit"', f'"{at_update}"')

    async def scene() -> int:
        cut = 0
        async with (
            house(
                tmp_path,
                dialect="sglang",
                policy=policy,
                settings=PATIENT,
                stream_every=stream_every,
            ) as the,
            RolloutScheduler.connect(the.url) as rollouts,
        ):
            await rollouts.submit(
                Prompt(f"g{n}", ids, 2, 100 + 50 * (n % 7), GREEDY) for n, ids in enumerate(PROMPTS)
            )
            await rollouts.close_submissions()
            published = 0
            async for batch in rollouts.batches():
                for sample in batch.samples:
                    spans = [(span.version, span.end - span.start) for span in sample.segments]
                    assert sample.response_ids == response(PROMPTS[int(sample.uid[1:])], spans)
                    cut += len({version for version, _ in spans}) > 1
                published += 1
                if published == 2:
                    the.servers[1].switchboard.set(Fault("restart", times=1, seconds=0.2))
                await rollouts.publish_weights(published, Reload(str(tmp_path / "weights")))
            assert the.anomalies == {}
        return cut

    assert virtual_net.run(scene()) > 4


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_trainer_that_loads_weights_around_us_is_noticed(tmp_path: Path, mode: str) -> None:
    """As slime does it, with the servers' own calls; responses go on whatever it aborts."""
    checkpoint(tmp_path / "weights")
    body = {"model_path": str(tmp_path / "weights"), "weight_version": "1", "flush_cache": False}

    async def scene() -> None:
        async with (
            house(tmp_path, dialect="sglang", settings=PATIENT, speed=200.0) as the,
            RolloutScheduler.connect(the.url) as rollouts,
        ):
            await rollouts.submit(
                Prompt(f"g{n}", ids, 2, 300, GREEDY) for n, ids in enumerate(PROMPTS[:4])
            )
            await rollouts.close_submissions()
            await asyncio.sleep(0.5)
            for call, told in (
                ("/pause_generation", {"mode": mode}),
                ("/update_weights_from_disk", body),
                ("/continue_generation", {}),
            ):
                for client in the.clients:
                    assert (await client.post(call, told))[0] == 200
            samples = [s async for batch in rollouts.batches() for s in batch.samples]
            cut = 0
            for sample in samples:
                spans = [(span.version, span.end - span.start) for span in sample.segments]
                cut += [version for version, _ in spans] == [0, 1]
                assert sample.response_ids == response(PROMPTS[int(sample.uid[1:])], spans)
            assert len(samples) == 8
            assert cut
            assert the.anomalies == {}

    virtual_net.run(scene())


@pytest.mark.parametrize(
    "fault", ["cut", "unfinished", "twice", "another", "garbage", "reset", "error_500", "silent"]
)
def test_no_fault_costs_or_doubles_a_token(tmp_path: Path, fault: str) -> None:
    """Of the calls to one server, two in five go wrong."""

    async def scene() -> None:
        async with (
            house(tmp_path, dialect="sglang", stream_every=4, speed=200.0) as the,
            RolloutScheduler.connect(the.url) as rollouts,
        ):
            the.strike(0, fault, probability=0.4)
            await rollouts.submit(
                Prompt(f"g{n}", ids, 2, 40, {**GREEDY, "logprobs": 0})
                for n, ids in enumerate(PROMPTS)
            )
            await rollouts.close_submissions()
            samples = [s async for batch in rollouts.batches() for s in batch.samples]
            assert len(samples) == 2 * len(PROMPTS)
            for sample in samples:
                prompt = PROMPTS[int(sample.uid[1:])]
                assert sample.response_ids == response(prompt, [(0, 40)])
                assert sample.rollout_log_probs == logprobs(prompt, 40)
            assert the.servers[0].switchboard.faults[fault].struck  # type: ignore[index]

    virtual_net.run(scene())
