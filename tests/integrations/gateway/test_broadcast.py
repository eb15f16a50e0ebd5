"""One order to several instances: who did it, who did not, and what that makes together."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rollout_sched.integrations.gateway.control_plane.auth import id_of
from rollout_sched.integrations.gateway.control_plane.fanout import (
    FleetCall,
    InstanceRefused,
    broadcast,
    to_each,
)
from tests.integrations.gateway.house import House, Upstream, run

A, B = "http://a:1", "http://b:1"


class Named:
    """As much of a supervisor as an order needs."""

    def __init__(self, name: str) -> None:
        self.name = name


def asked(*outcomes: Any) -> tuple[int, dict[str, Any]]:
    """What comes of an order that each instance answers with a result or an error."""
    told = dict(zip((A, B), outcomes, strict=False))

    async def order(supervisor: Any) -> dict[str, Any]:
        outcome = told[supervisor.name]
        if isinstance(outcome, Exception):
            raise outcome
        return cast(dict[str, Any], outcome)

    everybody = cast(Any, [Named(name) for name in told])
    return asyncio.run(to_each(everybody, order))


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([], 503),
        ([{}], 200),
        ([{}, {}], 200),
        ([{}, ValueError("boom")], 207),
        ([ValueError("boom"), ValueError("boom")], 502),
    ],
)
def test_the_status_says_whether_all_some_or_none_did_it(outcomes: list[Any], status: int) -> None:
    told, answer = asked(*outcomes)
    assert told == status
    assert answer["total"] == len(outcomes)
    assert answer["succeeded"] == len(answer["results"]) == len(outcomes) - len(answer["failed"])


def test_every_result_has_its_instance_and_how_long_it_took() -> None:
    _, answer = asked({"held": True})
    (result,) = answer["results"].items()
    assert result[0] == id_of(A)
    assert {**result[1], "latency_ms": 0} == {"url": A, "latency_ms": 0, "held": True}


def test_a_failure_says_whether_it_was_refused_or_not_reached() -> None:
    _, answer = asked(InstanceRefused(404, {"detail": "no such path"}), OSError())
    refused, unreached = answer["failed"]
    assert (refused["worker_id"], refused["status"], refused["error"]) == (id_of(A), 404, "refused")
    assert refused["message"] == {"detail": "no such path"}
    assert (unreached["status"], unreached["error"]) == (None, "unreachable")
    assert unreached["message"] == "OSError"


def call(path: str = "/flush_cache", query: str = "", pause: Any = None) -> FleetCall:
    return FleetCall("POST", path, query, [(b"x-a", b"1")], b"body", 5.0, pause)


def test_every_instance_is_asked_with_its_own_key() -> None:
    async def scene() -> None:
        async with House(Upstream(A), Upstream(B)) as house:
            supervisors = house.service.gateway.supervisors()
            status, answer = await broadcast(supervisors, call(query="level=1&x=%26"))
            assert (status, len(answer["results"])) == (200, 2)
            for instance in house.instances.values():
                (sent,) = instance.asked
                assert sent["path"] == "/flush_cache?level=1&x=%26"
                assert (sent["method"], sent["body"]) == ("POST", "body")
                assert sent["headers"]["authorization"] == "Bearer instance"
                assert sent["headers"]["x-a"] == "1"

    run(scene())


@pytest.mark.parametrize(("pause", "held"), [("hold", True), ("release", False), (None, False)])
def test_who_watches_an_instance_knows_that_it_stands_still(pause: Any, held: bool) -> None:
    async def scene() -> None:
        async with House(Upstream(A)) as house:
            (supervisor,) = house.service.gateway.supervisors()
            await broadcast([supervisor], call("/pause", pause=pause))
            assert supervisor.pauses.held is held
            await broadcast([supervisor], call("/resume", pause="release"))
            assert not supervisor.pauses.held

    run(scene())


def test_what_was_refused_has_not_been_done() -> None:
    async def scene() -> None:
        async with House(Upstream(A)) as house:
            house.instances[A].answers["/pause"] = (500, b"\xff no JSON")
            (supervisor,) = house.service.gateway.supervisors()
            status, answer = await broadcast([supervisor], call("/pause", pause="hold"))
            assert (status, answer["failed"][0]["status"]) == (502, 500)
            assert "no JSON" in answer["failed"][0]["message"]
            assert not supervisor.pauses.held

    run(scene())


def test_each_may_be_sent_a_body_of_its_own() -> None:
    async def scene() -> None:
        async with House(Upstream(A), Upstream(B)) as house:
            supervisors = house.service.gateway.supervisors()
            await broadcast(supervisors, call(), {A: b"for a", B: b"for b"})
            sent = [instance.asked[0]["body"] for instance in house.instances.values()]
            assert sent == ["for a", "for b"]

    run(scene())


def test_who_never_said_to_be_vllm_is_sent_nothing() -> None:
    async def scene() -> None:
        away = Upstream(A)
        away.dead = True
        async with House(away) as house:
            status, answer = await broadcast(house.service.gateway.supervisors(), call())
            assert status == 502
            assert "never answered as vLLM" in answer["failed"][0]["message"]
            assert not away.asked

    run(scene())


@pytest.mark.parametrize(
    ("said", "told"),
    [(b'{"a":1}', {"a": 1}), (b"plain", "plain"), (b"%d" % 2**70, str(2**70)), (b"", "")],
)
def test_an_answer_is_passed_on_in_a_form_that_every_format_holds(said: bytes, told: Any) -> None:
    async def scene() -> None:
        async with House(Upstream(A)) as house:
            house.instances[A].answers["/flush_cache"] = (200, said)
            _, answer = await broadcast(house.service.gateway.supervisors(), call())
            assert answer["results"][id_of(A)]["body"] == told

    run(scene())
