"""One screen, or one after the other."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollout_sched import top as command
from rollout_sched.cli import main
from rollout_sched.core.errors import CallerError
from rollout_sched.top import KEY, LARGEST, Away, GatewaySource, Watched, watch
from tests.top.served import serving


def text_of(watched: Watched) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(watched.look(height=40))
    return capture.get()


def test_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setenv("COLUMNS", "80")
    with serving() as gateway:
        assert main(["top", gateway.url, "--once", "--every", "0"]) == 0
        assert gateway.keys == ["Bearer secret"] * 2
    out = capsys.readouterr().out
    assert out.startswith(f"rollout_sched at {gateway.url}  healthy\npolicy best_async")
    assert "10.0.0.8:8000" in out, "all instances"


def test_unreachable_gateway_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as gateway:
        url = gateway.url
    assert main(["top", url, "--once"]) == 2
    assert capsys.readouterr().err.startswith("rollout-sched: ")


def test_gateway_outage_shows_the_last_known_state() -> None:
    with serving() as gateway:
        watched = Watched(GatewaySource(gateway.url, ""))
        assert "no answer" not in text_of(watched)
        gateway.status = 503
        gone = text_of(watched)
        assert f"no answer: {gateway.url}: the gateway answered 503. Below is the last" in gone
        assert "10.0.0.1:8000" in gone
        gateway.status = 200
        assert "no answer" not in text_of(watched)


def test_gateway_without_an_answer_shows_the_error() -> None:
    with serving() as gateway:
        gateway.status = 500
        watched = Watched(GatewaySource(gateway.url, ""))
        assert (
            text_of(watched)
            .strip()
            .endswith(f"no answer yet: {gateway.url}: the gateway answered 500")
        )


def test_it_goes_on_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    with serving() as gateway:
        console = Console(file=io.StringIO(), force_terminal=True, width=80, height=40)
        watch(GatewaySource(gateway.url, ""), console, 0.5)
        assert (slept, len(gateway.keys)) == ([0.5] * 3, 3)


def test_api_key_is_sent() -> None:
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
        (200, b"[" * 10**6, CallerError, "does not answer as"),
        (200, b'{"version":1%0400d}' % 0, CallerError, "does not answer as"),
        (200, b" " * (LARGEST + 1), CallerError, "answers with more than"),
    ],
)
def test_refusals(status: int, body: bytes | None, kind: type[Exception], text: str) -> None:
    with serving() as gateway:
        gateway.status, gateway.body = status, body
        with pytest.raises(kind, match=text):
            GatewaySource(gateway.url, "").ask()


def test_refused_connection_raises_away() -> None:
    with serving() as gateway:
        url = gateway.url
    with pytest.raises(Away, match="refused"):
        GatewaySource(url, "").ask()


@pytest.mark.parametrize("url", ["gateway:9000", "ftp://a", "http://", ""])
def test_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(CallerError, match="is not a gateway's URL"):
        GatewaySource(url, "")
