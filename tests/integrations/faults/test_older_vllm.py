"""Simulated servers with the API of vLLM 0.23, as vllm-ascend has it: what is lost, what is not."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.simulators.fake_instance.engine import FIRST
from tests import virtual_net
from tests.integrations.faults.fleet import GREEDY, POLICY, house, response
from tests.integrations.gateway.test_fleet import checkpoint

PROMPTS = [[n + 1, n + 2, n + 3] for n in range(16)]


def test_what_it_lacks_is_noted(tmp_path: Path) -> None:
    async def scene() -> tuple[set[str], str]:
        async with house(tmp_path, 1, as_vllm="0.23") as the:
            async with (
                aiohttp.ClientSession(the.url) as session,
                session.get("/admin/instances") as answer,
            ):
                (told,) = await answer.json()
            return set(told["capabilities"]), " ".join(told["notes"])

    offers, notes = virtual_net.run(scene())
    assert offers == {"generate", "pause", "collective_rpc", "weight_transfer"}
    assert "cannot abort a request and keep its tokens" in notes
    assert "cannot label tokens with versions" in notes


@pytest.mark.parametrize("stream_every", [0, 4])
@pytest.mark.parametrize("at_update", ["resubmit", "in_place"])
def test_a_run_is_right_as_far_as_can_be_known(
    tmp_path: Path, at_update: str, stream_every: int
) -> None:
    """No token is lost or doubled, whatever was cut. Which version made it, the server does not
    tell, as its label never changes: it counts as the one that its attempt was sent under. A
    response that is cut keeps what was streamed of it."""
    checkpoint(tmp_path / "weights")
    policy = POLICY.replace('"resubmit"', f'"{at_update}"')

    async def scene() -> None:
        resumed = 0
        async with (
            house(tmp_path, policy=policy, as_vllm="0.23", stream_every=stream_every) as the,
            RolloutScheduler.connect(the.url) as rollouts,
        ):
            await rollouts.submit(
                Prompt(f"g{n}", ids, 2, 100 + 30 * (n % 7), GREEDY) for n, ids in enumerate(PROMPTS)
            )
            await rollouts.close_submissions()
            version = 0
            async for batch in rollouts.batches():
                for sample in batch.samples:
                    number = int(sample.uid[1:])
                    whole = response(PROMPTS[number], [(FIRST, 100 + 30 * (number % 7))])
                    assert sample.response_ids == whole
                    resumed += len(sample.segments) > 1
                    assert sample.staleness <= 3
                version += 1
                await rollouts.publish_weights(version, Reload(str(tmp_path / "weights")))
            assert the.anomalies == {}
        if at_update == "resubmit" and stream_every:
            assert resumed > 4

    virtual_net.run(scene())
