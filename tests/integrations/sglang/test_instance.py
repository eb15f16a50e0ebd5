"""A SGLang server behind the port, against the simulated one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.integrations.sglang.instance import SglangGenerate
from rollout_sched.integrations.sglang.protocol import sampling_for_sglang, sampling_for_vllm
from rollout_sched.integrations.vllm.dialects import AnswerAssembler
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    Order,
    Output,
    RequestRejected,
    RequestTooLong,
    WeightsUnknown,
)
from rollout_sched.simulators.fake_instance.engine import EngineSettings, Fault
from rollout_sched.simulators.fake_instance.server import EngineName, FakeServer
from tests import virtual_net
from tests.simulators.fake_instance.served import FOREVER, PROMPT, SPEC


def order(name: str = "run-1", tokens: int = 8, **more: Any) -> Order:
    sampling = {**FOREVER, "logprobs": 0, **more.pop("sampling", {})}
    return Order(name, PROMPT, tokens, "v3", sampling, **more)


@asynccontextmanager
async def server(dialect: EngineName = "sglang", **settings: Any) -> AsyncIterator[FakeServer]:
    made = FakeServer(EngineSettings(SPEC, speed=1000.0, **settings), dialect=dialect)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def joined(
    dialect: EngineName = "sglang", engines: set[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[EngineInstance, FakeServer]]:
    async with server(dialect, **settings) as made:
        port = await made.start("127.0.0.1", 0)
        instance = EngineInstance(f"http://127.0.0.1:{port}", engines=engines)
        try:
            await instance.describe()
            yield instance, made
        finally:
            await instance.close()


def run(
    scene: Callable[[EngineInstance, FakeServer], Awaitable[Any]],
    dialect: EngineName = "sglang",
    **settings: Any,
) -> Any:
    async def play() -> Any:
        async with joined(dialect, **settings) as (instance, made):
            return await scene(instance, made)

    return virtual_net.run(play())


def started(instance: EngineInstance, *orders: Order) -> list[asyncio.Task[Output]]:
    return [asyncio.ensure_future(instance.generate(each)) for each in orders]


async def running(instance: EngineInstance, count: int) -> None:
    while (await instance.gauges()).running != count:
        await asyncio.sleep(0.001)


# -- what it is -----------------------------------------------------------------------------


async def looked_at(instance: EngineInstance, made: FakeServer) -> Any:
    return instance.findings, await instance.limits(), await instance.world_size()


def test_it_is_described() -> None:
    findings, limits, ranks = run(looked_at, world_size=4)
    told = findings.description
    sizes = (told.slots, told.kv_tokens, told.max_model_len)
    assert sizes == (8, 4000, 4000)
    assert (told.model, told.version, told.paused) == ("simulated", None, False)
    assert (limits.block_size, limits.max_num_batched_tokens, ranks) == (4, 512, 4)
    assert limits.version == "0.5.23"


@pytest.mark.parametrize(
    ("version", "noted"), [("0.5.9", 2), ("", 2), ("0.5.23.post1", 1), ("1.0", 1)]
)
def test_an_older_version_is_noted(
    version: str, noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_sched.simulators.fake_instance.sglang.VERSION", version)
    findings, *_ = run(looked_at)
    assert len(findings.notes) == noted


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_engine_is_found_out(dialect: EngineName) -> None:
    findings, *_ = run(looked_at, dialect)
    target = "/generate" if dialect == "sglang" else "/inference/v1/generate"
    assert findings.dialect.target == target


def test_a_fleet_has_one_engine() -> None:
    async def scene() -> None:
        engines: set[str] = set()
        async with joined("vllm", engines), joined("vllm", engines):
            with pytest.raises(InstanceError, match="it is SGLang, and the other"):
                async with joined("sglang", engines):
                    pass

    virtual_net.run(scene())


# -- generating -----------------------------------------------------------------------------


def test_both_engines_answer_an_order_alike() -> None:
    async def made(instance: EngineInstance, _: FakeServer) -> list[Output]:
        await instance.set_version(7)
        got: list[int] = []
        streamed = order("run-2", stream_every=3)
        whole = await instance.generate(order())
        parts = await instance.generate(streamed, lambda ids, _: got.extend(ids))
        assert parts.token_ids[: len(got)] == got
        assert got
        return [whole, parts]

    sglang, vllm = run(made), run(made, "vllm")
    assert sglang == vllm
    assert [output.spans for output in sglang] == [((7, 8),), ((7, 8),)]


def test_an_abort_ends_one_request_with_its_tokens() -> None:
    """SGLang aborts every request whose id begins with the given one."""

    async def scene(instance: EngineInstance, _: FakeServer) -> None:
        one, ten = started(instance, order("run-1", 3000), order("run-10", 300))
        await running(instance, 2)
        await asyncio.sleep(0.02)
        await instance.abort("run-1")
        await instance.abort("run-2")  # which is not there
        cut = await one
        assert cut.finish == "abort"
        assert 0 < len(cut.token_ids) < 300
        assert (await ten).finish == "length"

    run(scene)


def test_refusals() -> None:
    async def scene(instance: EngineInstance, made: FakeServer) -> None:
        with pytest.raises(RequestTooLong):
            await instance.generate(order(tokens=4000))
        with pytest.raises(RequestRejected, match="no sampling parameter 'bad_words'"):
            await instance.generate(order(sampling={"bad_words": ["x"]}))
        made.switchboard.set(Fault("error_500", times=1))
        with pytest.raises(InstanceError):
            await instance.generate(order())

    run(scene)


def events(chunks: list[list[int]], *, cumulative: bool, abort: bool) -> list[bytes]:
    """The events of a stream of SGLang's; log-probs of a token are minus its id."""
    made: list[int] = []
    told = []
    for number, chunk in enumerate(chunks):
        made += chunk
        last = number == len(chunks) - 1
        ids = made if cumulative else chunk
        if last and abort and not cumulative:
            ids = made[-1:]  # SGLang's echo of an abort: the last token again
        pairs = [(-float(token), token, None) for token in (made if last and abort else ids)]
        finish = {"type": "abort", "message": "x"} if abort else {"type": "length", "length": 1}
        meta = {
            "id": "run-1.",
            "finish_reason": finish if last else None,
            "completion_tokens": len(made),
            "output_token_logprobs": pairs,
            "weight_versions": [{"version": "3", "start": 0, "end": len(made)}],
        }
        told.append(msgspec.json.encode({"output_ids": ids, "meta_info": meta}))
    return told


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_a_stream_has_each_token_once(
    chunks: list[list[int]], cumulative: bool, abort: bool
) -> None:
    """Whatever the server repeats: all so far, or the last token with an abort."""
    sent = [*chunks, []] if abort else chunks
    dialect, got = SglangGenerate(), list[int]()
    assembler = AnswerAssembler(order(tokens=100), lambda ids, _: got.extend(ids))
    for event in events(sent, cumulative=cumulative, abort=abort):
        assembler.add(dialect.read(event))
    output = assembler.output()
    true = [token for chunk in chunks for token in chunk]
    assert output.token_ids == true
    assert output.logprobs == [-float(token) for token in true]
    assert got == true[: len(got)]
    assert output.spans == ((3, len(true)),)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"output_ids": [1], "meta_info": {"completion_tokens": 3}}, AnswerUntrue),
        ({"meta_info": {}}, AnswerUntrue),
        ({"output_ids": [2], "meta_info": {"output_token_logprobs": [[0, 3, None]]}}, AnswerUntrue),
        ({"error": {"message": "too long", "code": 400}}, RequestRejected),
        ({"error": {"message": "it died", "code": 503}}, InstanceError),
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "status_code": 400}}},
         RequestRejected),
    ],
)  # fmt: skip
def test_answers_that_are_none(answer: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        AnswerAssembler(order()).add(SglangGenerate().read(msgspec.json.encode(answer)))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_k": st.integers(1, 50),
            "stop": st.lists(st.text(min_size=1), min_size=1),
            "min_tokens": st.integers(0, 9),
            "max_tokens": st.integers(1, 99),
            "seed": st.integers(0, 2**40),
            "include_stop_str_in_output": st.booleans(),
        },
    )
)
def test_sampling_is_the_same_there_and_back(sampling: dict[str, Any]) -> None:
    back = sampling_for_vllm(sampling_for_sglang(sampling))
    assert {name: back[name] for name in sampling} == sampling
    assert sampling_for_sglang({"top_k": 0})["top_k"] == -1  # 0 is refused there


# -- pauses and weights ---------------------------------------------------------------------


@pytest.mark.parametrize("clear", [False, True])
def test_requests_go_on_in_place_after_a_pause(clear: bool) -> None:
    async def scene(instance: EngineInstance, made: FakeServer) -> None:
        await instance.set_version(1)
        (one,) = started(instance, order(tokens=200))
        await running(instance, 1)
        await asyncio.sleep(0.02)
        await instance.pause("keep", clear)
        assert await instance.is_paused()
        prefilled = (await instance.gauges()).prefill_tokens
        await instance.set_version(2)
        await instance.resume()
        output = await one
        assert (output.finish, len(output.token_ids)) == ("length", 200)
        assert [version for version, _ in output.spans] == [1, 2], "no label aborts anything"
        again = (await instance.gauges()).prefill_tokens - prefilled
        assert (again > len(PROMPT)) is clear, "its KV is computed again if it was cleared"

    run(scene)


def test_a_pause_by_abort_gives_back_what_was_made() -> None:
    async def scene(instance: EngineInstance, _: FakeServer) -> None:
        (one,) = started(instance, order(tokens=3000))
        await running(instance, 1)
        await instance.pause("abort", True)
        assert (await one).finish == "abort"
        await instance.resume()
        assert not await instance.is_paused()
        assert (await instance.generate(order("run-3"))).finish == "length"

    run(scene)


def test_weights_from_disk_leave_requests_and_their_cache(tmp_path: Any) -> None:
    async def scene(instance: EngineInstance, _: FakeServer) -> None:
        (one,) = started(instance, order(tokens=100))
        await running(instance, 1)
        await instance.pause("keep", False)
        await instance.collective_rpc("reload_weights", {"weights_path": str(tmp_path)})
        await instance.set_version(5)
        await instance.resume()
        assert len((await one).token_ids) == 100
        assert await instance.weight_version() == 5
        with pytest.raises(InstanceError, match="no method 'sleep'"):
            await instance.collective_rpc("sleep", {})
        with pytest.raises(InstanceError, match="no weights at"):
            await instance.collective_rpc("reload_weights", {"weights_path": "/nowhere"})

    run(scene)


@pytest.mark.parametrize(
    ("info", "calls"),
    [
        (
            {"names": ["w"], "dtypes": ["bf16"], "shapes": [[1]]},
            ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"],
        ),
        (
            {"serialized_named_tensors": ["gA"]},
            ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"],
        ),
        ({"zmq_handles": {"GPU-0": "ipc:///x"}}, ["/update_weights_from_ipc"]),
    ],
)
def test_weights_by_transfer(info: dict[str, Any], calls: list[str]) -> None:
    async def scene(instance: EngineInstance, _: FakeServer) -> list[str]:
        seen: list[str] = []
        call = instance.control.call

        async def noted(path: str, *args: Any, **more: Any) -> bytes:
            seen.append(path)
            return await call(path, *args, **more)

        instance.control.call = noted  # type: ignore[method-assign]
        await instance.weight_transfer("init_weight_transfer_engine", {"init_info": {}})
        await instance.weight_transfer("start_weight_update", {})
        await instance.weight_transfer("update_weights", {"update_info": info})
        await instance.weight_transfer("finish_weight_update", {})
        return seen

    assert run(scene) == calls


def test_a_restart_is_noticed() -> None:
    async def scene(instance: EngineInstance, made: FakeServer) -> None:
        await instance.set_version(4)
        await instance.generate(order())
        before = (await instance.gauges()).started_at
        assert (await instance.gauges()).started_at == before
        await made.restart(0.0)
        await asyncio.sleep(0.01)
        with pytest.raises(WeightsUnknown):
            await instance.generate(order("run-2"))
        assert await instance.weight_version() is None
        assert (await instance.gauges()).started_at != before
        assert (await instance.describe()).started_at != before

    run(scene)
