"""The client against real vLLM servers: what is interrupted goes on, and weights really change.

One server has every flag and the weights of version 0; the other has no flag at all and the
weights of version 1, so it also is the fresh server that an updated one must equal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import __version__

from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.integrations.vllm.weights import ReloadFromDisk, WeightTransfer
from rollout_sched.live.ports import InstanceError, Order, Output, RequestRejected
from tests.vllm import disk_transfer, servers

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
PROMPT = [random.Random(1).randrange(3, 2000) for _ in range(300)]
LONG = 800  # tokens; some two seconds, so that there is time to interrupt
LIMIT_S = 120

#: Capabilities of the installed vLLM that 0.32 does not have.
NEW = set() if __version__.startswith("0.32") else {"return_weight_versions"}

pytestmark = pytest.mark.real_time(LIMIT_S)


@pytest.fixture(scope="module")
def urls(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Both servers; they start side by side."""
    plugin, logs = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("logs")
    disk_transfer.install(plugin)
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details"]
    flags += ["--weight-transfer-config", f'{{"backend": "{disk_transfer.NAME}"}}']
    with (
        servers.serving(
            models[0], logs, *flags, dev_mode=True, core=0, PYTHONPATH=str(plugin)
        ) as whole,
        servers.serving(models[1], logs, dev_mode=False, core=1) as bare,
    ):
        yield [whole.wait(), bare.wait()]


@pytest.fixture(scope="module")
def whole_server(urls: list[str]) -> str:
    return urls[0]


@pytest.fixture(scope="module")
def bare_server(urls: list[str]) -> str:
    return urls[1]


@pytest.fixture(scope="module")
def uninterrupted(whole_server: str) -> Output:
    """What the whole server makes of the prompt when nobody disturbs it."""
    return on(whole_server, lambda instance: instance.generate(order(LONG)))


@asynccontextmanager
async def described(url: str, **settings: Any) -> AsyncIterator[HttpInstance]:
    """A new client."""
    instance = HttpInstance(url, **settings)
    try:
        await instance.describe()
        yield instance
    finally:
        await instance.close()


@pytest.fixture
def endpoint() -> str | None:
    """Any; parametrized where it matters."""
    return None


@pytest.fixture
@asynccontextmanager
async def instance(whole_server: str, endpoint: Any) -> AsyncIterator[HttpInstance]:
    settings = {"endpoint": endpoint} if endpoint else {}
    async with described(whole_server, **settings) as made:
        yield made


@pytest.fixture
@asynccontextmanager
async def bare(bare_server: str) -> AsyncIterator[HttpInstance]:
    async with described(bare_server, slots=8) as made:
        yield made


def on(url: str, use: Callable[[HttpInstance], Awaitable[Any]], **settings: Any) -> Any:
    """What `use(instance)` returns, on a new client."""

    async def used() -> Any:
        async with described(url, **settings) as instance:
            return await asyncio.wait_for(use(instance), LIMIT_S)

    return asyncio.run(used())


_orders = iter(range(10**9))


def order(tokens: int, context: list[int] = PROMPT, salt: str = "", **more: Any) -> Order:
    """A new order; a salt of its own unless one is given, so that no test helps another."""
    number = next(_orders)
    return Order(f"o{number}", context, tokens, salt or f"own{number}", GREEDY, **more)


async def until_it_has_made(instance: HttpInstance, tokens: int) -> None:
    """Wait until the instance has generated so many more tokens."""
    start = (await instance.gauges()).generated_tokens
    while (await instance.gauges()).generated_tokens < start + tokens:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(instance: HttpInstance, an_order: Order):
    """An attempt that has made some tokens, and is far from its end."""
    attempt = asyncio.create_task(instance.generate(an_order))
    await until_it_has_made(instance, 40)
    assert not attempt.done()
    yield attempt


async def interrupted(instance: HttpInstance, an_order: Order) -> Output:
    async with running(instance, an_order) as attempt:
        await instance.abort(an_order.id)
        partial = await attempt
    assert partial.finish == "abort"
    assert 0 < len(partial.token_ids) < an_order.max_new_tokens
    return partial


def assert_equal(joined: list[Output], expected: Output) -> None:
    """Token for token; log-probs as near as other batches and chunks of the same sums allow."""
    tokens = [token for output in joined for token in output.token_ids]
    logprobs = [logprob for output in joined for logprob in output.logprobs or []]
    assert tokens == expected.token_ids[: len(tokens)]
    assert logprobs == pytest.approx((expected.logprobs or [])[: len(tokens)], abs=1e-4)


@asynccontextmanager
async def updated(instance: HttpInstance, apply: Any, version: int):
    """A weight update as the driver sequences it, and the first weights again afterwards."""
    await instance.pause("keep", clear_cache=False)
    await apply(instance, version)
    await instance.set_version(version)
    await instance.resume()
    yield


async def test_the_whole_server_offers_everything(instance: HttpInstance) -> None:
    findings = instance.findings
    description = findings.description
    assert description.slots == servers.MAX_NUM_SEQS
    assert description.kv_tokens == servers.KV_TOKENS
    assert description.max_model_len == servers.MAX_MODEL_LEN
    assert description.model == "tiny"
    assert description.started_at > 1.6e9
    assert description.capabilities == {
        *("generate", "abort", "pause", "collective_rpc", "weight_transfer"),
        *("set_version", "weight_info", "weight_versions"),
        *NEW,
    }
    assert findings.notes == ()


def test_both_endpoints_give_the_same(whole_server: str) -> None:
    async def use(instance: HttpInstance) -> Output:
        return await instance.generate(order(50))

    generated = on(whole_server, use, endpoint="generate")
    completed = on(whole_server, use, endpoint="completions")
    assert (len(generated.token_ids), generated.finish) == (50, "length")
    assert completed.finish == "length"
    assert_equal([completed], generated)


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
async def test_an_interrupted_order_goes_on_as_if_it_had_not_been(
    instance: HttpInstance, uninterrupted: Output, endpoint: Any
) -> None:
    partial = await interrupted(instance, order(LONG, salt="kept"))
    before = (await instance.gauges()).cached_tokens
    rest = await instance.generate(order(50, [*PROMPT, *partial.token_ids], salt="kept"))
    found = (await instance.gauges()).cached_tokens - before
    context = len(PROMPT) + len(partial.token_ids)
    assert context - 2 * servers.BLOCK_SIZE <= found < context
    assert_equal([partial, rest], uninterrupted)


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
async def test_streamed_tokens_are_those_of_the_answer(
    instance: HttpInstance, uninterrupted: Output, endpoint: Any
) -> None:
    pieces: list[list[int]] = []
    enough = asyncio.Event()

    def on_tokens(tokens: Any, logprobs: Any) -> None:
        pieces.append(list(tokens))
        assert len(logprobs) == len(tokens)
        if len(pieces) == 4:
            enough.set()

    an_order = order(LONG, stream_every=16)
    attempt = asyncio.create_task(instance.generate(an_order, on_tokens))
    await enough.wait()
    await instance.abort(an_order.id)
    output = await attempt
    assert output.finish == "abort"
    assert [len(piece) for piece in pieces[:4]] == [1, 16, 16, 16]
    streamed = [token for piece in pieces for token in piece]
    assert streamed == output.token_ids[: len(streamed)]
    assert len(output.token_ids) - len(streamed) < 16  # what comes with the end
    assert_equal([output], uninterrupted)


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_a_pause_keeps_the_kv_unless_it_clears_the_cache(
    instance: HttpInstance, uninterrupted: Output, clear_cache: bool
) -> None:
    before = (await instance.gauges()).preemptions
    async with running(instance, order(LONG)) as attempt:
        await instance.pause("keep", clear_cache)
        late = asyncio.create_task(instance.generate(order(3)))
        frozen = await instance.gauges()
        await asyncio.sleep(0.1)
        assert (await instance.gauges()).generated_tokens == frozen.generated_tokens
        assert not late.done()
        await instance.resume()
        output, _ = await asyncio.gather(attempt, late)
    assert (await instance.gauges()).preemptions - before == int(clear_cache)
    assert_equal([output], uninterrupted)


async def test_a_pause_that_aborts_gives_the_tokens_back(instance: HttpInstance) -> None:
    async with running(instance, order(LONG)) as attempt:
        await instance.pause("abort", clear_cache=False)
        output = await attempt
        await instance.resume()
    assert output.finish == "abort"
    assert output.token_ids


def test_kv_is_retained_or_recomputed_by_salt_across_an_update(
    whole_server: str, bare_server: str, models: list[Path]
) -> None:
    async def before(instance: HttpInstance) -> Output:
        return await interrupted(instance, order(LONG, salt="v0"))

    partial = on(whole_server, before)
    context = [*PROMPT, *partial.token_ids]

    async def go_on(instance: HttpInstance) -> Output:
        return await instance.generate(order(60, context))

    fresh = on(bare_server, go_on, slots=8)

    async def update(instance: HttpInstance) -> None:
        reload = ReloadFromDisk(lambda version: models[version])
        try:
            async with updated(instance, reload, 1):
                cached = (await instance.gauges()).cached_tokens
                recomputed = await instance.generate(order(60, context, salt="v1"))
                assert (await instance.gauges()).cached_tokens == cached
                retained = await instance.generate(order(60, context, salt="v0"))
                assert (await instance.gauges()).cached_tokens > cached + len(PROMPT)
            assert_equal([recomputed], fresh)
            assert recomputed.spans == retained.spans == ((1, 60),)
            assert retained.token_ids != fresh.token_ids
        finally:
            await reload(instance, 0)

    on(whole_server, update)


async def test_spans_say_which_weights_made_a_token(
    instance: HttpInstance, models: list[Path]
) -> None:
    reload = ReloadFromDisk(lambda version: models[version % 2])
    await instance.set_version(10)
    assert (await instance.describe()).version == 10
    made = 0

    def on_tokens(tokens: Any, logprobs: Any) -> None:
        nonlocal made
        made += len(tokens)

    attempt = asyncio.create_task(instance.generate(order(LONG, stream_every=1), on_tokens))
    await until_it_has_made(instance, 40)
    await instance.pause("keep", clear_cache=False)
    await asyncio.sleep(0.2)  # what was made before the pause arrives
    first = made
    await reload(instance, 11)
    await instance.set_version(11)
    await instance.resume()
    output = await attempt
    await reload(instance, 10)
    assert output.spans == ((10, first), (11, LONG - first))


def test_weights_are_transferred(whole_server: str, bare_server: str, models: list[Path]) -> None:
    async def make(instance: HttpInstance) -> Output:
        return await instance.generate(order(60))

    def file(version: int) -> dict[str, str]:
        return {"path": str(models[version] / "model.safetensors")}

    async def transfer(instance: HttpInstance) -> tuple[Output, Output, Output]:
        apply = WeightTransfer(file, {}, list)
        first = await make(instance)
        async with updated(instance, apply, 1):
            second = await make(instance)
        async with updated(instance, apply, 0):
            return first, second, await make(instance)

    first, second, third = on(whole_server, transfer)
    assert first.token_ids != second.token_ids
    assert_equal([second], on(bare_server, make, slots=8))
    assert_equal([third], first)


async def test_a_call_that_fails_is_an_error_of_the_instance(instance: HttpInstance) -> None:
    with pytest.raises(InstanceError, match="/collective_rpc answered 500"):
        await instance.collective_rpc("no_such_method", {})
    assert (await instance.generate(order(3))).finish == "length"


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
@pytest.mark.parametrize("context", [[99_999], [5] * (servers.MAX_MODEL_LEN + 1)])
async def test_a_request_at_fault(
    instance: HttpInstance, endpoint: Any, context: list[int]
) -> None:
    with pytest.raises(RequestRejected) as caught:
        await instance.generate(order(3, context))
    assert caught.value.status == 400
    assert caught.value.body


async def test_an_unknown_id_is_no_one_elses(instance: HttpInstance) -> None:
    attempt = asyncio.create_task(instance.generate(order(100)))
    await instance.abort("nobody")
    assert (await attempt).finish == "length"


async def test_gauges_tell_the_load(instance: HttpInstance) -> None:
    orders = [order(LONG) for _ in range(servers.MAX_NUM_SEQS + 2)]
    before = await instance.gauges()
    attempts = [asyncio.create_task(instance.generate(each)) for each in orders]
    await until_it_has_made(instance, 20 * len(orders))
    busy = await instance.gauges()
    await asyncio.gather(*(instance.abort(each.id) for each in orders))
    made = sum(len(output.token_ids) for output in await asyncio.gather(*attempts))
    assert (busy.running, busy.waiting) == (servers.MAX_NUM_SEQS, 2)
    assert 0 < busy.kv_usage < 1
    assert busy.prefill_tokens - before.prefill_tokens == servers.MAX_NUM_SEQS * len(PROMPT)
    assert made >= busy.generated_tokens - before.generated_tokens > 0


async def test_a_cancelled_attempt_frees_its_slot(instance: HttpInstance) -> None:
    async with running(instance, order(LONG)) as attempt:
        attempt.cancel()
        while (await instance.gauges()).running:
            await asyncio.sleep(0.01)


def test_the_bare_server_is_used_as_far_as_it_goes(bare_server: str) -> None:
    async def use(instance: HttpInstance) -> Any:
        return instance.findings

    with pytest.raises(InstanceError, match="give slots"):
        on(bare_server, use)
    findings = on(bare_server, use, slots=8)
    versions = {"weight_versions"} if NEW else set()
    assert findings.description.capabilities == {"completions", *versions, *NEW}
    assert findings.abort_path is None
    assert any("--enable-scale-out" in note for note in findings.notes)
    assert any("VLLM_SERVER_DEV_MODE=1" in note for note in findings.notes)


async def test_on_the_bare_server_an_abort_keeps_what_was_streamed(bare: HttpInstance) -> None:
    enough = asyncio.Event()
    an_order = order(LONG, stream_every=8)
    attempt = asyncio.create_task(bare.generate(an_order, lambda *_: enough.set()))
    await enough.wait()
    await bare.abort(an_order.id)
    partial = await attempt
    assert partial.finish == "abort"
    rest = await bare.generate(order(50, [*PROMPT, *partial.token_ids]))
    assert_equal([partial, rest], await bare.generate(order(LONG)))
    while (await bare.gauges()).running:
        await asyncio.sleep(0.01)
