"""What a trainer asks is asked again where that does no harm."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.client.remote import calls
from rollout_sched.client.remote.calls import (
    GatewayError,
    TrainerCalls,
    error_of,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.live.trainer.delivery import LeaseEnded
from rollout_sched.store.errors import StoreFull
from tests import virtual_net


class Calls(TrainerCalls):
    """Answers what a test has laid out, one after the other."""

    def __init__(self, *answers: tuple[int, bytes] | GatewayError) -> None:
        super().__init__("a gateway")
        self.answers = list(answers)
        self.sent: list[tuple[str, str, bytes]] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def greet(self) -> dict[str, Any]:
        return {}

    async def once(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        self.sent.append((method, path, data))
        answer = self.answers.pop(0)
        if isinstance(answer, GatewayError):
            raise answer
        return answer


AWAY = GatewayError("nobody is there")


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.001)
    monkeypatch.setattr(calls, "TRIES", 3)


def test_only_what_is_safe_to_repeat_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(AWAY, AWAY, (200, b"here"))
    assert virtual_net.run(calls.send("GET", "/x", repeatable=True)) == (200, b"here")
    assert calls.sent == [("GET", "/x", b"")] * 3
    assert caplog.text.count("retrying for") == 1
    calls = Calls(AWAY)
    with pytest.raises(GatewayError):
        virtual_net.run(calls.post("/x"))
    assert calls.sent == [("POST", "/x", b"\x80")]


def test_it_is_not_asked_for_ever() -> None:
    calls = Calls(AWAY, AWAY, AWAY)
    with pytest.raises(GatewayError, match="nobody is there"):
        virtual_net.run(calls.send("GET", "/x", repeatable=True))


def test_answered_call_is_not_repeated() -> None:
    calls = Calls(GatewayError("later", 503))
    with pytest.raises(GatewayError):
        virtual_net.run(calls.send("GET", "/x", repeatable=True))
    assert len(calls.sent) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, CallerError), (410, LeaseEnded), (507, StoreFull), (500, GatewayError)],
)
def test_status_tells_the_kind_of_error(status: int, kind: type[Exception]) -> None:
    error = error_of("there", status, b'{"error": {"message": "because"}}')
    assert type(error) is kind
    assert "because" in str(error)
    assert "<html>" in str(error_of("there", status, b"<html>"))
