"""What a gateway answers, and what is made of what it does not."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.top.command import Away, GatewaySource
from tests.top.served import serving


def test_its_key_goes_along() -> None:
    with serving() as gateway:
        assert GatewaySource(gateway.url + "/", "secret").ask().policy == "best_async"
        GatewaySource(gateway.url, "").ask()
        assert gateway.keys == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (401, None, CallerError, "ROLLOUT_SCHED_ADMIN_KEY"),
        (403, None, CallerError, "ROLLOUT_SCHED_ADMIN_KEY"),
        (404, None, CallerError, "not a gateway, or an older one"),
        (503, None, Away, "answered 503"),
        (200, b"<html>", CallerError, "does not answer as rollout-sched-live/1"),
        (200, b'{"schema":"rollout-sched-live/2"}', CallerError, "use the same version"),
    ],
)
def test_refusals(status: int, body: bytes | None, kind: type[Exception], text: str) -> None:
    with serving() as gateway:
        gateway.status, gateway.body = status, body
        with pytest.raises(kind, match=text):
            GatewaySource(gateway.url, "").ask()


def test_nobody_there() -> None:
    with serving() as gateway:
        url = gateway.url
    with pytest.raises(Away, match="refused"):
        GatewaySource(url, "").ask()


@pytest.mark.parametrize("url", ["gateway:9000", "ftp://a", "http://", ""])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(CallerError, match="is not a gateway's URL"):
        GatewaySource(url, "")
