"""Orders as calls: what each carries, and what becomes of one that is cut."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from rollout_sched.integrations.http.client import Pool
from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.dialects import AnswerAssembler, Generate
from rollout_sched.integrations.vllm.orders import OrderCalls, no_trace, renamed
from rollout_sched.integrations.vllm.protocol.endpoints import GENERATE
from rollout_sched.live.ports import InstanceError, RequestRejected
from tests.integrations.vllm.scripted import ScriptedVllm, an_order, generated


@pytest.fixture
def server():
    return ScriptedVllm()


@pytest.fixture
@asynccontextmanager
async def calls(server):
    async with server.serving():
        pool = Pool(server.url)
        yield OrderCalls(pool, b"x-mine: 1\r\n", Throttle(1000, "rate"), None)
        pool.close()


def make(calls, order, cuttable=False, on_tokens=None):
    call = calls.make_cuttable if cuttable else calls.make
    return call(order, Generate(), "tiny", AnswerAssembler(order, on_tokens))


@pytest.mark.parametrize("cuttable", [False, True])
async def test_an_order_is_answered(cuttable, server, calls):
    server.answer(GENERATE, generated([10, 11], "stop"))
    output = await make(calls, an_order(), cuttable)
    assert (output.token_ids, output.finish) == ([10, 11], "stop")


@pytest.mark.parametrize("cuttable", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRejected), (401, InstanceError), (500, InstanceError)]
)
async def test_a_refusal_names_who_is_at_fault(cuttable, status, kind, server, calls):
    server.answer(GENERATE, b"no", status)
    with pytest.raises(kind, match=f"{GENERATE} answered {status}: no"):
        await make(calls, an_order(), cuttable)


async def test_an_answer_longer_than_it_can_be_is_refused(server, calls):
    server.answer(GENERATE, b" " * 2**21)
    with pytest.raises(InstanceError, match="too large"):
        await make(calls, an_order())


async def test_an_unreachable_server_is_an_error():
    nobody = OrderCalls(Pool("http://127.0.0.1:1"), b"", Throttle(1000, "rate"), None)
    with pytest.raises(InstanceError, match=f"{GENERATE} failed"):
        await make(nobody, an_order())


OURS = b"traceparent: 00-ours\r\n"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"a: 1\r\n", b"a: 1\r\n" + OURS),
        (b"Traceparent: 00-theirs\r\na: 1\r\ntracestate: x=1\r\n", b"a: 1\r\n" + OURS),
        (b"x-traceparent: 1\r\n", b"x-traceparent: 1\r\n" + OURS),
        (b"", OURS),
    ],
)
def test_the_instances_key_replaces_the_clients(lines: bytes, told: bytes) -> None:
    assert renamed(lines, OURS) == told


def test_the_clients_key_stays_without_an_instances_key() -> None:
    lines = b"traceparent: 00-theirs\r\n"
    assert renamed(lines, no_trace("order-1")) == lines
