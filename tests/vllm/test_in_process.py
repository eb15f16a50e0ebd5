"""The same port over an engine in this process: what is interrupted goes on, weights change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.in_process import InProcessInstance
from rollout_sched.integrations.vllm.weights import ReloadFromDisk
from rollout_sched.live.ports import InstanceError, Order, Output, RequestRejected

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
PROMPT = [random.Random(2).randrange(3, 2000) for _ in range(100)]
LONG = 800
KV_TOKENS = 8192
_orders = iter(range(10**9))


def order(tokens: int, context: list[int] = PROMPT, salt: str = "", **more: Any) -> Order:
    number = next(_orders)
    sampling = more.pop("sampling", GREEDY)
    return Order(f"p{number}", context, tokens, salt or f"own{number}", sampling, **more)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """An engine belongs to one event loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def instance(runner: asyncio.Runner, models: list[Path]) -> Iterator[InProcessInstance]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(
        model=str(models[0]),
        served_model_name="tiny",
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        block_size=32,
        kv_cache_memory_bytes=KV_TOKENS * 1024,
        distributed_executor_backend="uni",
    )

    async def start() -> InProcessInstance:
        return InProcessInstance.start(arguments)

    instance = runner.run(start())
    yield instance
    instance.engine.shutdown()


async def until_it_has_made(instance: InProcessInstance, tokens: int) -> None:
    start = (await instance.gauges()).generated_tokens
    while (await instance.gauges()).generated_tokens < start + tokens:
        await asyncio.sleep(0.005)


async def interrupted(instance: InProcessInstance, an_order: Order) -> Output:
    attempt = asyncio.create_task(instance.generate(an_order))
    await until_it_has_made(instance, 40)
    await instance.abort(an_order.id)
    partial = await attempt
    assert partial.finish == "abort"
    assert 0 < len(partial.token_ids) < an_order.max_new_tokens
    return partial


def assert_equal(joined: list[Output], expected: Output) -> None:
    tokens = [token for output in joined for token in output.token_ids]
    logprobs = [logprob for output in joined for logprob in output.logprobs or []]
    assert tokens == expected.token_ids[: len(tokens)]
    assert logprobs == pytest.approx((expected.logprobs or [])[: len(tokens)], abs=1e-4)


def test_it_describes_itself(runner: asyncio.Runner, instance: InProcessInstance) -> None:
    description = runner.run(instance.describe())
    assert (description.slots, description.max_model_len, description.model) == (4, 1024, "tiny")
    assert description.kv_tokens == KV_TOKENS
    assert "pause" in description.capabilities


def test_an_interrupted_order_goes_on(runner: asyncio.Runner, instance: InProcessInstance) -> None:
    async def use() -> None:
        partial = await interrupted(instance, order(LONG, salt="kept"))
        before = (await instance.gauges()).cached_tokens
        rest = await instance.generate(order(50, [*PROMPT, *partial.token_ids], salt="kept"))
        context = len(PROMPT) + len(partial.token_ids)
        assert context - 64 <= (await instance.gauges()).cached_tokens - before < context
        assert_equal([partial, rest], await instance.generate(order(LONG)))

    runner.run(use())


def test_what_was_streamed_is_the_answer_but_for_its_last_tokens(
    runner: asyncio.Runner, instance: InProcessInstance
) -> None:
    async def use() -> None:
        chunks: list[list[int]] = []
        an_order = order(100, stream_every=16)
        output = await instance.generate(an_order, lambda tokens, _: chunks.append(list(tokens)))
        ends = list(accumulate(map(len, chunks)))
        assert ends  # what comes while we are busy comes together; the rest comes with the end
        assert set(ends) <= {1, *range(17, 98, 16)}
        assert [token for chunk in chunks for token in chunk] == output.token_ids[: ends[-1]]
        assert (len(output.token_ids), len(output.logprobs or [])) == (100, 100)

    runner.run(use())


def test_weights_change_under_a_frozen_order(
    runner: asyncio.Runner, instance: InProcessInstance, models: list[Path]
) -> None:
    async def use() -> None:
        reload = ReloadFromDisk(lambda version: models[version % 2])
        await instance.set_version(10)
        first = await instance.generate(order(30))
        made = 0

        def on_tokens(tokens: Any, logprobs: Any) -> None:
            nonlocal made
            made += len(tokens)

        attempt = asyncio.create_task(instance.generate(order(LONG, stream_every=1), on_tokens))
        await until_it_has_made(instance, 40)
        await instance.pause("keep", clear_cache=False)
        await asyncio.sleep(0.2)  # what was made before the pause arrives
        before = made
        await reload(instance, 11)
        await instance.set_version(11)
        await instance.resume()
        assert (await attempt).spans == ((10, before), (11, LONG - before))
        second = await instance.generate(order(30))
        assert (await instance.describe()).version == 11
        await reload(instance, 10)
        assert second.token_ids != first.token_ids
        assert_equal([await instance.generate(order(30))], first)

    runner.run(use())


def test_a_pause_that_aborts_gives_the_tokens_back(
    runner: asyncio.Runner, instance: InProcessInstance
) -> None:
    async def use() -> None:
        attempt = asyncio.create_task(instance.generate(order(LONG)))
        await until_it_has_made(instance, 40)
        await instance.pause("abort", clear_cache=True)
        output = await attempt
        await instance.resume()
        assert output.finish == "abort"
        assert output.token_ids

    runner.run(use())


def test_a_cancelled_attempt_frees_its_slot(
    runner: asyncio.Runner, instance: InProcessInstance
) -> None:
    async def use() -> None:
        attempt = asyncio.create_task(instance.generate(order(LONG)))
        await until_it_has_made(instance, 40)
        assert (await instance.gauges()).running == 1
        attempt.cancel()
        await asyncio.wait([attempt])
        assert attempt.cancelled()
        while (await instance.gauges()).running:
            await asyncio.sleep(0.005)

    runner.run(use())


@pytest.mark.parametrize(
    "an_order",
    [
        order(3, [99_999]),
        order(3, [5] * 2000),
        order(3, sampling={"no_such_parameter": 1}),
        order(3, sampling={"temperature": -1.0}),
        order(3, sampling={"n": 2}),
    ],
)
def test_a_request_at_fault(
    runner: asyncio.Runner, instance: InProcessInstance, an_order: Order
) -> None:
    with pytest.raises(RequestRejected):
        runner.run(instance.generate(an_order))


def test_unknown_ids_and_methods(runner: asyncio.Runner, instance: InProcessInstance) -> None:
    runner.run(instance.abort("nobody"))
    with pytest.raises(InstanceError, match="no_such_method failed"):
        runner.run(instance.collective_rpc("no_such_method", {}))
    assert runner.run(instance.generate(order(3))).finish == "length"


def test_load_is_known_only_if_it_is_pushed(
    runner: asyncio.Runner, instance: InProcessInstance
) -> None:
    with pytest.raises(CallerError, match=r"InProcessInstance\.start"):
        runner.run(InProcessInstance(instance.engine).gauges())
