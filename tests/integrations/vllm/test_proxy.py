"""A call that the gateway makes on an instance's pool: named while it lasts, cut if need be."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.http.errors import AnswerBroken, NotConnected
from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.proxy import ProxyCall
from rollout_sched.live.ports import (
    ConnectionBroken,
    InstanceError,
    InstanceUnreached,
    RequestRejected,
)
from tests.integrations.gateway.scripted import Exchange
from tests.integrations.http.wires import Heard


class Stage:
    """A call of order "o", and the throttle it passes."""

    def __init__(self, rate: int = 10) -> None:
        self.register: dict[str, ProxyCall] = {}
        self.receiver = Heard()
        self.exchange = Exchange()
        self.sent = 0
        self.error: Exception | None = None
        self.throttle = Throttle(rate, "rate")
        self.proxy_call = ProxyCall("o", "cmpl-o-0", self.receiver, self.register)

    def send(self) -> None:
        self.proxy_call.send(self.throttle, self._send)

    def _send(self) -> Exchange:
        self.sent += 1
        if self.error is not None:
            raise self.error
        return self.exchange


def test_a_call_is_known_by_its_order_while_it_lasts() -> None:
    stage = Stage()
    stage.send()
    assert stage.register["o"].engine_id == "cmpl-o-0"
    stage.proxy_call.on_head(200, [])
    stage.proxy_call.on_data(b"x")
    stage.proxy_call.on_end()
    assert (stage.receiver.status, stage.receiver.body) == (200, b"x")
    assert stage.receiver.calls == ["head", "data", "end"]
    assert not stage.register


def test_an_unread_answer_is_held_back() -> None:
    stage = Stage()
    stage.send()
    stage.proxy_call.pause()
    assert stage.exchange.paused == 1
    stage.proxy_call.resume()
    assert stage.exchange.paused == 0


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (AnswerBroken("reset"), ConnectionBroken),
        (NotConnected("refused"), InstanceUnreached),
        (KeyError("a bug"), KeyError),
    ],
)
def test_a_broken_call_says_how_far_it_came(what: Exception, says: type[Exception]) -> None:
    stage = Stage()
    stage.send()
    stage.proxy_call.on_error(what)
    error = stage.receiver.error
    assert stage.receiver.calls == ["error"]
    assert type(error) is says
    assert str(error) == str(what)
    assert not stage.register


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (ValueError("a line break"), RequestRejected),
        (RuntimeError("the pool is closed"), InstanceUnreached),
        (KeyError("a bug"), KeyError),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
async def test_a_call_that_cannot_be_sent_ends(
    raised: Exception, says: type[Exception], waits: bool
) -> None:
    stage = Stage(rate=1)
    stage.throttle.period = 0.05
    stage.error = raised
    if waits:
        assert stage.throttle.take()
        stage.send()
        await asyncio.sleep(0.2)
        error = stage.receiver.error
        assert stage.receiver.calls == ["error"]
        assert type(error) is says
    else:
        with pytest.raises(says):
            stage.send()
        assert not stage.receiver.calls
    assert not stage.register


def test_a_cancelled_call_is_silent_and_a_cut_one_says_why() -> None:
    cancelled, cut = Stage(), Stage()
    for stage in (cancelled, cut):
        stage.send()
    cancelled.proxy_call.cancel()
    assert not cancelled.receiver.calls
    cut.proxy_call.cut()
    error = cut.receiver.error
    assert cut.receiver.calls == ["error"]
    assert isinstance(error, InstanceError)
    for stage in (cancelled, cut):
        assert stage.exchange.cancelled
        assert not stage.register


async def test_a_call_waits_its_turn() -> None:
    stage = Stage(rate=1)
    stage.throttle.period = 0.05
    assert stage.throttle.take()
    stage.send()
    assert not stage.sent
    stage.proxy_call.pause()
    await asyncio.sleep(0.2)
    assert stage.sent == 1
    assert stage.exchange.paused == 1
    stage.proxy_call.resume()
    assert stage.exchange.paused == 0


async def test_a_call_that_still_waits_its_turn_is_forgotten_when_cancelled() -> None:
    stage = Stage(rate=1)
    stage.throttle.period = 0.05
    assert stage.throttle.take()
    stage.send()
    stage.proxy_call.cancel()
    await asyncio.sleep(0.2)
    assert not stage.sent
    assert not stage.register
