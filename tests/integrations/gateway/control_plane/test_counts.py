"""What an instance is doing, in the words of the metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import (
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestInterrupted,
    Woke,
)
from rollout_sched.integrations.gateway.control_plane.counts import (
    EVERY_S,
    Counters,
    LoopLag,
    RunLog,
)
from rollout_sched.metrics.results import Step
from tests.integrations.gateway.control_plane.test_prometheus import BODY
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.scripted import completion
from tests.live.scripted import until
from tests.metrics.told import sample, tell

A = "http://a:1"


async def test_the_states_of_an_instance(house, instance) -> None:
    instance.stream = asyncio.Queue()
    figures, driver = house.service.gateway.figures, house.driver
    state_of = figures._state_of
    assert state_of("nobody") == ""
    assert state_of(A) == "idle"
    asking = asyncio.create_task(house.session.post("/v1/completions", json=BODY))
    await until(lambda: instance.asked)
    assert state_of(A) == "busy"
    figures.fleet.seconds(driver.pump.now)
    instance.stream.put_nowait(json.dumps(completion([5])).encode())
    instance.stream.put_nowait(None)
    assert (await asking).status == 200
    assert state_of(A) == "idle"
    driver.versions.close_gate(A, "somebody loads weights")
    assert state_of(A) == "closed"
    await driver.supervisors[A].control.hold("keep", False)
    assert state_of(A) == "held"
    assert set(figures.fleet.seconds(driver.pump.now)) == {"idle", "busy", "closed"}


def test_requests_and_tokens_by_outcome() -> None:
    counters = Counters()
    thrown = [Discard("r", 3, "stale"), Discard("r", 2, "surplus", ends=True)]
    tell(
        counters,
        [
            (0.0, Woke(), [Answer(sample("r", 5)), Answer(sample("r", 7))]),
            (0.0, Woke(), [Deliver(0, 0, (sample("g/0", 11),), last=False), Deliver(0, 0, ())]),
            (0.0, Woke(), list(thrown)),
        ],
    )
    assert counters.outcomes == {"answered": 2, "delivered": 1, "surplus": 1}
    assert counters.tokens == {"answered": 12, "delivered": 11, "stale": 3, "surplus": 2}
    assert counters.batches == 1, "its parts are not batches"


def test_attempts_and_whose_fault_it_is_that_some_fail() -> None:
    counters = Counters()
    sent = [Dispatch("r", 2, "a", 3, 9, 0), Dispatch("r", 3, "a", 7, 9, 0, response_tokens=4)]
    tell(
        counters,
        [
            (0.0, RequestInterrupted("r", 1, 4), list(sent)),
            (1.0, RequestFailed("r", 2, "400", "request"), []),
            (1.0, RequestFailed("r", 3, "gone", "instance"), []),
        ],
    )
    assert (counters.attempts, counters.resumed, counters.interrupted) == (2, 1, 1)
    assert counters.failed == {"request": 1, "instance": 1}


def test_a_drained_instance_does_not_count_as_lost() -> None:
    counters = Counters()
    gone = [InstanceLost("a", "it hangs"), InstanceLost("b", "drained", requested=True)]
    tell(counters, [(0.0, event, []) for event in gone])
    assert counters.gone == {"lost": 1, "removed": 1}


def test_gauges_of_a_removed_instance_are_removed() -> None:
    counters = Counters()
    report = InstanceReported("a", 0, 0, 0.0, generated_tokens=9)
    tell(counters, [(0.0, report, [])])
    assert counters.reports == {"a": report}
    tell(counters, [(0.0, InstanceLost("a"), [])])
    assert counters.reports == {}


A_RUN_LOG, B = "http://a:1", "http://b:1"


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
async def test_a_drained_instance_is_not_logged_as_lost(
    path: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with House(Upstream(A_RUN_LOG), Upstream(B)) as house:
        gone = house.driver.supervisors[A_RUN_LOG]
        names = {
            view["url"]: view["id"] for view in (await house.ask("GET", "/workers"))[1]["workers"]
        }
        method, _, route = path.format(names[A_RUN_LOG]).partition(" ")
        assert (await house.ask(method, route))[0] in (200, 202, 204)
        await until(lambda: gone.name not in house.driver.supervisors)
        counters = house.service.gateway.figures.counters
        assert counters.gone == {"removed": 1}
        assert not any("lost" in line for line in house.said)
    assert f"instance {A_RUN_LOG} was {said}" in caplog.messages
    assert not any("lost" in line for line in caplog.messages)
    assert (f"instance {A_RUN_LOG} drains" in caplog.messages) == (said == "drained")


async def test_a_dead_instance_is_logged_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream(A_RUN_LOG)
    async with House(upstream) as house:
        upstream.dead = True
        house.driver.supervisors[A_RUN_LOG].health.check_now()
        await until(lambda: house.service.gateway.figures.counters.gone == {"lost": 1})
    (lost,) = [record for record in caplog.records if "lost" in record.getMessage()]
    assert (lost.levelname, lost.getMessage().startswith(f"instance {A_RUN_LOG} lost: ")) == (
        "WARNING",
        True,
    )


async def test_instance_answers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="rollout_sched")
    upstream = Upstream(A_RUN_LOG)
    quoted = {"error": {"message": "cannot read 'my secret prompt'"}}
    upstream.answers["/v1/completions"] = (400, quoted)
    async with House(upstream) as house:
        body = {"model": "tiny", "prompt": "my secret prompt", "max_tokens": 3}
        async with house.session.post("/v1/completions", json=body) as response:
            assert "my secret prompt" in await response.text(), "its client is told"
    assert any("answered 400" in line for line in caplog.messages)
    assert "secret" not in caplog.text


@pytest.mark.real_time
async def test_a_blocked_loop_is_measured_and_the_probe_ends() -> None:
    lag = LoopLag()
    lag.start()
    time.sleep(EVERY_S + 0.2)  # the loop is held up
    await until(lambda: sum(lag.seconds.counts))
    assert lag.seconds.sum >= 0.2
    lag.stop()
    seen = sum(lag.seconds.counts)
    await asyncio.sleep(2 * EVERY_S)
    assert sum(lag.seconds.counts) == seen
