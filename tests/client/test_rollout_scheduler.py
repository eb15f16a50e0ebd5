"""What a trainer holds: the same in process and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout_sched.client import (
    Applied,
    Batch,
    GatewayError,
    Prompt,
    Reload,
    RolloutScheduler,
    Sample,
    rollout_scheduler,
)
from rollout_sched.client.remote import calls
from rollout_sched.core.errors import CallerError
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.vllm.scripted import ScriptedVllm
from tests.live.scripted import Scripted, until

NAME = "http://a:1"
WAYS = ["in process", "over HTTP"]


@asynccontextmanager
async def rollouts_by(
    way: str, instance: Any, policy: str = "round_robin_sync", prompts_per_step: int = 1
) -> AsyncIterator[RolloutScheduler]:
    if way == "in process":
        async with RolloutScheduler.from_toml(
            policy, [instance], prompts_per_step=prompts_per_step, allow_code=True
        ) as rollouts:
            yield rollouts
    else:
        async with (
            House(
                instance, policy=policy, prompts_per_step=prompts_per_step, allow_code=True
            ) as house,
            RolloutScheduler.connect(house.service.url) as rollouts,
        ):
            yield rollouts


def prompts(*uids: str) -> list[Prompt]:
    return [Prompt(uid, [1, 2], 1, 9) for uid in uids]


@pytest.mark.parametrize("way", WAYS)
async def test_a_training_loop(way: str) -> None:
    instance = Upstream(NAME)
    async with rollouts_by(way, instance) as rollouts:
        await rollouts.submit(prompts("a", "b"))
        await rollouts.close_submissions()
        got = []

        async def answer() -> None:
            await instance.answer(0, [5])
            await instance.answer(1, [6])

        answering = asyncio.create_task(answer())
        async for batch in rollouts.batches():
            got.append([(s.uid, s.response_ids, s.versions) for s in batch.samples])
            await rollouts.publish_weights(batch.version + 1, Applied(), wait=True)
        await answering
        assert got == [[("a", [5], [0])], [("b", [6], [1])]]
        state = await rollouts.state()
        assert (state["version"], state["fleet_version"], state["batches"]) == (2, 2, 2)


@pytest.mark.parametrize("way", WAYS)
async def test_gradients_are_accumulated_over_parts(way: str, tmp_path: Path) -> None:
    """Two batches of two groups each."""
    policy = tmp_path / "streamed.toml"
    policy.write_text('[batching]\nuse = "sync"\npart_prompts = 1\n')
    instance = Upstream(NAME)
    async with rollouts_by(way, instance, str(policy), prompts_per_step=2) as rollouts:
        await rollouts.submit(prompts(*"abcd"))
        await rollouts.close_submissions()
        steps: list[list[str]] = [[]]

        async def after(number: int) -> None:
            """Not before the part before has been taken."""
            await until(lambda: sum(map(len, steps)) == number)
            await instance.answer(number, [5])

        answering = asyncio.gather(*(after(number) for number in range(4)))
        async for part in rollouts.parts():
            steps[-1] += [sample.uid for sample in part.samples]
            if part.last:
                steps.append([])
                await rollouts.publish_weights(part.version + 1, Applied(), wait=True)
        await answering
        assert steps == [["a", "b"], ["c", "d"], []]


@pytest.mark.parametrize("way", WAYS)
async def test_batches_may_be_left_and_taken_up_again(way: str) -> None:
    instance = Upstream(NAME)
    async with rollouts_by(way, instance) as rollouts:
        await rollouts.submit(prompts("a", "b"))
        await rollouts.close_submissions()
        seen = []
        for number in range(2):
            answering = asyncio.create_task(instance.answer(number, [5 + number]))
            async for batch in rollouts.batches():
                seen.append(batch.samples[0].uid)
                break
            await answering
        assert seen == ["a", "b"]
        assert await rollouts.next_batch() is None


@pytest.mark.parametrize("way", WAYS)
async def test_concurrent_calls_get_the_same_batch(way: str) -> None:
    """It counts as received once the next one is asked for."""
    instance = Upstream(NAME)
    async with rollouts_by(way, instance) as rollouts:
        await rollouts.submit(prompts("a", "b"))
        await rollouts.close_submissions()
        asking = [asyncio.create_task(rollouts.next_batch()) for _ in range(2)]
        await instance.answer(0, [5])
        first, same = await asyncio.gather(*asking)
        assert first == same
        answering = asyncio.create_task(instance.answer(1, [6]))
        second = await rollouts.next_batch()
        await answering
        assert first is not None
        assert second is not None
        assert [batch.samples[0].uid for batch in (first, second)] == ["a", "b"]


@pytest.mark.parametrize("way", WAYS)
async def test_caller_errors_are_the_same_on_both_ways(way: str) -> None:
    async with rollouts_by(way, Upstream(NAME)) as rollouts:
        with pytest.raises(CallerError, match="'a' was already submitted"):
            await rollouts.submit([*prompts("a"), Prompt("a", [9], 1, 9)])
        for _ in range(2):
            await rollouts.publish_weights(1, Applied())
        with pytest.raises(CallerError, match="versions must increase"):
            await rollouts.publish_weights(1, Reload("/nowhere"))
        with pytest.raises(CallerError, match="no such folder"):
            await rollouts.publish_weights(2, Reload("/nowhere"))
        with pytest.raises(CallerError, match="no instance"):
            await rollouts.remove_instance("http://nobody:1")
        assert (await rollouts.state())["version"] == 1


@pytest.mark.parametrize("way", WAYS)
async def test_instances_come_and_go(way: str) -> None:
    instance, server = Upstream(NAME), ScriptedVllm()
    async with rollouts_by(way, instance) as rollouts, server.serving():
        if way == "in process":
            await rollouts.add_instance(server.url)
            with pytest.raises(InstanceError):
                await rollouts.add_instance("http://127.0.0.1:1")
            assert (await rollouts.state())["joined"] == 2
        else:
            with pytest.raises(GatewayError, match="refused"):
                await rollouts.add_instance("http://127.0.0.1:1")
            with pytest.raises(CallerError, match="URL"):
                await rollouts.add_instance(Scripted())
        await rollouts.remove_instance(NAME, drain=True)
        await until(lambda: instance.closed)


async def test_a_coroutine_loads_weights_in_process() -> None:
    instance = Upstream(NAME)
    loaded: list[tuple[str, int]] = []

    async def apply(client: Any, version: int) -> None:
        await asyncio.sleep(0.01)
        loaded.append((client.name, version))

    async with rollouts_by("in process", instance) as rollouts:
        await rollouts.publish_weights(1, apply, wait=True)
        assert loaded == [(NAME, 1)]


@pytest.mark.parametrize(
    ("way", "why"), [("in process", "is not lent"), ("over HTTP", "from_toml")]
)
async def test_returning_an_instance_not_lent_is_refused(way: str, why: str) -> None:
    async with rollouts_by(way, Upstream(NAME)) as rollouts:
        with pytest.raises(CallerError, match=why):
            await rollouts.return_instance(NAME)


async def test_a_coroutine_cannot_travel() -> None:
    async def apply(client: Any, version: int) -> None: ...

    async with rollouts_by("over HTTP", Upstream(NAME)) as rollouts:
        with pytest.raises(CallerError, match="cannot be sent"):
            await rollouts.publish_weights(1, apply)


async def test_a_trainer_that_starts_anew_gets_what_it_had_not_acknowledged() -> None:
    instance = Upstream(NAME)
    async with House(instance) as house:
        url = house.service.url
        async with RolloutScheduler.connect(url) as rollouts:
            await rollouts.submit(prompts("a"))
            answering = asyncio.create_task(instance.answer(0, [5]))
            first = await rollouts.next_batch()
            await answering
        async with RolloutScheduler.connect(url) as rollouts:
            assert await rollouts.next_batch() == first


async def test_many_prompts_go_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_sched.client.remote.client.PORTION_TOKENS", 4)
    async with (
        House(Upstream(NAME), max_body=200) as house,
        RolloutScheduler.connect(house.service.url) as rollouts,
    ):
        await rollouts.submit(prompts(*(f"g{n}" for n in range(9))))
        assert (await rollouts.state())["groups"]["fresh"] == 9


async def test_a_gateway_that_is_away_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.1)
    async with House(Upstream(NAME)) as house:
        url = house.service.url
        rollouts = await RolloutScheduler.connect(url).__aenter__()
    with pytest.raises(GatewayError):
        await rollouts.submit(prompts("a"))  # it may have arrived: not repeated
    asking = asyncio.create_task(rollouts.state())
    await until(lambda: "retrying for" in caplog.text)
    async with House(Upstream(NAME), port=int(url.rsplit(":", 1)[1])):
        assert (await asking)["version"] == 0
    await rollouts.__aexit__()


async def test_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root\n")
    async with House(Upstream(NAME), admin_key_file=keys) as house:
        with pytest.raises(GatewayError, match="administrator's key") as refused:
            await RolloutScheduler.connect(house.service.url).__aenter__()
        assert refused.value.status == 401
        async with RolloutScheduler.connect(house.service.url, key="root") as rollouts:
            assert (await rollouts.state())["version"] == 0


@pytest.mark.parametrize("way", WAYS)
async def test_prompts_are_arrays_of_numpy(way: str) -> None:
    instance = Upstream(NAME)
    async with rollouts_by(way, instance) as rollouts:
        ids: Any = np.array([1, 2])
        sampling = {"temperature": np.float64(0.5), "logprobs": np.int64(0)}
        await rollouts.submit([Prompt("a", ids, np.int64(1), np.int32(9), sampling)])
        asking = asyncio.create_task(rollouts.next_batch())
        order = await instance.order()
        assert list(order.token_ids) == [1, 2]
        assert order.sampling["temperature"] == 0.5
        await instance.answer(0, [5])
        batch = await asking
        assert type(batch.samples[0].prompt_ids[0]) is int


@pytest.mark.parametrize("way", WAYS)
async def test_prompts_before_a_refused_one_stay(way: str) -> None:
    async with rollouts_by(way, Upstream(NAME)) as rollouts:
        wrong: Any = Prompt("c", ["x"], 1, 9)  # type: ignore[list-item]
        with pytest.raises(CallerError, match=r"'c': Expected `int`, got `str` .*prompt_ids"):
            await rollouts.submit([*prompts("a", "b"), wrong, *prompts("d")])
        assert (await rollouts.state())["groups"]["fresh"] == 2


@pytest.mark.parametrize("way", WAYS)
async def test_endless_wait_logs_its_reason(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_scheduler, "POLL_S", 0.001)
    async with rollouts_by(way, Upstream(NAME), prompts_per_step=4) as rollouts:
        await rollouts.submit(prompts("a"))
        asking = asyncio.create_task(rollouts.next_batch())
        await until(lambda: "a batch needs 4 groups, 1 are here" in caplog.text)
        await rollouts.remove_instance(NAME)
        await until(lambda: "no instance has joined" in caplog.text)
        publishing = asyncio.create_task(rollouts.publish_weights(1, Applied(), wait=True))
        await until(lambda: "waiting for version 1: no instance has joined" in caplog.text)
        for task in (asking, publishing):
            task.cancel()
        await asyncio.gather(asking, publishing, return_exceptions=True)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x?y"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(CallerError, match="http://host:port"):
        RolloutScheduler.connect(url)


async def test_it_is_used_within_async_with() -> None:
    with pytest.raises(CallerError, match="async with"):
        await RolloutScheduler.connect("http://127.0.0.1:1").state()


async def test_a_batch_is_the_same_on_both_ways() -> None:
    """What a sample holds survives the wire."""
    batches = []
    for way in WAYS:
        instance = Upstream(NAME)
        async with rollouts_by(way, instance) as rollouts:
            prompt = Prompt("a", [1, 2], 1, 9, {"logprobs": 0}, extra={"row": [1, None, "x"]})
            await rollouts.submit([prompt])
            answering = asyncio.create_task(instance.answer(0, [5, 6], "length"))
            batches.append(await rollouts.next_batch())
            await answering
    assert batches[0] == batches[1]
    assert msgspec.to_builtins(batches[0])["samples"][0]["status"] == "TRUNCATED"


async def first_token(sample: Sample) -> dict[str, float]:
    """What [rewards] of a policy file names below."""
    return {"answer": float(sample.response_ids[0]), "format": 0.5}


REWARDED = """
[batching]
use = "sync"
part_prompts = 2

[rewards]
use = "tests.client.test_rollout_scheduler:first_token"
keep = "nonzero_variance"
"""


@pytest.mark.parametrize("way", WAYS)
async def test_rewards_come_with_the_samples_of_each_micro_batch(way: str, tmp_path: Path) -> None:
    """A step of three groups in parts of two: whole groups, counted by step, the last one smaller;
    who was filtered is made up for and named, and the step is not short."""
    policy = tmp_path / "rewarded.toml"
    policy.write_text(REWARDED)
    instance = Upstream(NAME)
    async with rollouts_by(way, instance, str(policy), prompts_per_step=3) as rollouts:
        await rollouts.submit(Prompt(uid, [1, 2], 2, 9) for uid in "abcde")
        parts: list[Batch] = []

        async def answer() -> None:
            for number, token in enumerate([5, 5, 1, 2, 3, 4]):  # a teaches nothing
                await instance.answer(number, [token])
            await until(lambda: len(parts) == 1)
            for number, token in enumerate([7, 8], 6):  # of d, which takes its place
                await instance.answer(number, [token, token])

        answering = asyncio.create_task(answer())
        async for part in rollouts.parts():
            parts.append(part)
            if part.last:
                break
        await answering
        first, last = parts
        assert [sorted(part.groups()) for part in parts] == [["b", "c"], ["d"]]
        assert [(part.number, part.part, part.last) for part in parts] == [
            (0, 0, False),
            (0, 1, True),
        ]
        assert (first.filtered, last.filtered, last.missing) == (["a"], [], 0)
        assert {sample.reward for sample in first.samples} == {1.5, 2.5, 3.5, 4.5}
        assert last.samples[0].rewards == {"answer": 7.0, "format": 0.5}
        shares = first.balanced(2)
        assert [{sample.uid for sample in share} for share in shares] == [{"b"}, {"c"}]


@pytest.mark.parametrize("way", WAYS)
async def test_groups_filtered_at_the_end_shorten_the_last_batch(way: str, tmp_path: Path) -> None:
    policy = tmp_path / "rewarded.toml"
    policy.write_text(REWARDED)
    instance = Upstream(NAME)
    async with rollouts_by(way, instance, str(policy), prompts_per_step=2) as rollouts:
        await rollouts.submit(Prompt(uid, [1, 2], 2, 9) for uid in "ab")
        await rollouts.close_submissions()
        asking = asyncio.create_task(rollouts.next_batch())
        for number, token in enumerate([5, 5, 1, 2]):
            await instance.answer(number, [token])
        batch = await asking
        assert (sorted(batch.groups()), batch.filtered, batch.missing) == (["b"], ["a"], 1)
        assert await rollouts.next_batch() is None


async def test_reward_function_is_called(tmp_path: Path) -> None:
    async def length(sample: Sample) -> int:
        return len(sample.response_ids)

    instance = Scripted()
    rollouts = RolloutScheduler.from_toml(
        "round_robin_sync",
        [instance],
        prompts_per_step=1,
        reward=length,
        keep=lambda samples: samples[0].uid != "a",
    )
    async with rollouts:
        await rollouts.submit(prompts("a", "b"))
        asking = asyncio.create_task(rollouts.next_batch())
        await instance.answer(0, [5, 6])
        await instance.answer(1, [7, 8, 9])
        batch = await asking
        assert (batch.filtered, batch.samples[0].reward) == (["a"], 3.0)


async def test_a_filter_without_rewards_is_refused() -> None:
    rollouts = RolloutScheduler.from_toml("dplb", [Scripted()], keep="nonzero_variance")
    with pytest.raises(CallerError, match=r"dplb: rewards\.use: missing"):
        async with rollouts:
            pass
