"""What happens in a run is a line with its figures; a drain is no loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.integrations.gateway.control_plane.counts import RunLog
from rollout_sched.metrics.steps import Step
from tests.integrations.gateway.house import House, Upstream, run
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


class Pump:
    """Whom it is to be told of."""

    def __init__(self) -> None:
        self.watchers: dict[type[Any], Callable[[Any], None]] = {}
        self.pump = self

    def watch(self, watcher: Callable[[Any], None], *kinds: type[Any]) -> None:
        self.watchers |= dict.fromkeys(kinds, watcher)


def test_a_step_s_end_with_its_tail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = RunLog(Pump())  # type: ignore[arg-type]
    step = Step(3, 0.0, samples=128, tokens=90_000, rollout_s=61.25, t50_s=12.0, t90_s=30.0)
    told.step_ended(4, step)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "step 4 ended: 128 samples, 90000 tokens in 61.2 s (half of it by 12.0 s, 90 % by 30.0 s); "
        "staleness up to 0, 0% idle"
    )
    assert record.fields["t90_s"] == 30.0  # type: ignore[attr-defined]


def test_weights_that_are_published_and_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pump = Pump()
    told = RunLog(pump)  # type: ignore[arg-type]
    pump.watchers[ev.WeightsPublished](ev.WeightsPublished(7))
    pump.watchers[ev.WeightsPublished](ev.WeightsPublished(8, loads=False))
    told.loaded(8, 4, 3.14)
    assert caplog.messages == [
        "version 7 is published",
        "version 8 is published, loaded by the trainer",
        "version 8 is on all 4 instances, 3.1 s after publication",
    ]


@pytest.mark.parametrize(
    ("path", "said"),
    [("POST /admin/instances/{}/drain", "drained"), ("DELETE /admin/instances/{}", "removed")],
)
def test_who_is_let_go_is_not_lost(path: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scene() -> None:
        async with House(Upstream(A), Upstream(B)) as house:
            gone = house.driver.supervisors[A]
            names = {
                view["url"]: view["id"]
                for view in (await house.ask("GET", "/workers"))[1]["workers"]
            }
            method, _, route = path.format(names[A]).partition(" ")
            assert (await house.ask(method, route))[0] in (200, 202, 204)
            await until(lambda: gone.name not in house.driver.supervisors)
            counters = house.service.gateway.figures.counters
            assert counters.gone == {"removed": 1}
            assert not any("lost" in line for line in house.said)

    run(scene())
    assert f"instance {A} was {said}" in caplog.messages
    assert not any("lost" in line for line in caplog.messages)
    assert (f"instance {A} drains" in caplog.messages) == (said == "drained")


def test_who_dies_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        upstream = Upstream(A)
        async with House(upstream) as house:
            upstream.dead = True
            house.driver.supervisors[A].health.check_now()
            await until(lambda: house.service.gateway.figures.counters.gone == {"lost": 1})

    run(scene())
    (lost,) = [record for record in caplog.records if "lost" in record.getMessage()]
    assert (lost.levelname, lost.getMessage().startswith(f"instance {A} lost: ")) == (
        "WARNING",
        True,
    )


def test_what_an_instance_answers_is_quoted_in_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="rollout_sched")

    async def scene() -> None:
        upstream = Upstream(A)
        quoted = {"error": {"message": "cannot read 'my secret prompt'"}}
        upstream.answers["/v1/completions"] = (400, quoted)
        async with House(upstream) as house:
            body = {"model": "tiny", "prompt": "my secret prompt", "max_tokens": 3}
            async with house.session.post("/v1/completions", json=body) as response:
                assert "my secret prompt" in await response.text(), "its client is told"

    run(scene())
    assert any("answered 400" in line for line in caplog.messages)
    assert "secret" not in caplog.text
