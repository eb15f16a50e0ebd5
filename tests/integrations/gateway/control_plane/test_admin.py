"""/admin: instances, weights, pauses and state."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.integrations.vllm import weights
from rollout_sched.live.requests.token_payload import TokenPayload
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"


async def test_instances_are_listed_with_their_state() -> None:
    late = Upstream(B)
    late.dead = True
    async with House(Upstream(A), late) as house:
        _, (first, second) = await house.ask("GET", "/admin/instances")
        assert (first["url"], first["status"], first["slots"]) == (A, "serving", 8)
        assert (second["status"], second["version"]) == ("away", None)
        assert "refused" in second["reason"]
        assert await house.ask("GET", f"/admin/instances/{second['id']}") == (200, second)


async def test_an_instance_may_be_added_before_it_is_up() -> None:
    async with House() as house:
        late = Upstream(A)
        late.dead = True
        await late.open()
        house.instances[A] = late
        assert (await house.ask("POST", "/admin/instances", {"url": A}))[0] == 502
        body = {"url": A, "patient": True}
        status, view = await house.ask("POST", "/admin/instances", body)
        assert (status, view["status"]) == (202, "away")
        late.dead = False
        house.driver.supervisors[A].health.check_now()
        await until(lambda: house.service.gateway.healthy)
        assert (await house.ask("DELETE", f"/admin/instances/{view['id']}"))[0] == 204
        assert (await house.ask("DELETE", f"/admin/instances/{view['id']}"))[0] == 404


async def test_a_draining_instance_finishes_its_requests(house, instance) -> None:
    payload = TokenPayload([1], {})
    house.driver.submit(payload, 1, 9)
    await instance.order()
    for _ in range(2):
        status, view = await house.ask("POST", f"/admin/instances/{A}/drain")
        assert (status, view["leaving"]) == (202, True)
    assert not instance.closed
    await instance.answer(0, [7])
    await until(lambda: instance.closed)
    assert payload.response_ids == [7]
    assert (await house.ask("GET", "/admin/instances")) == (200, [])
    assert not house.driver.pump.scheduler.state.anomalies


async def test_a_draining_instance_may_be_removed_at_once(house, instance) -> None:
    house.driver.submit(TokenPayload([1], {}), 1, 9)
    await instance.order()
    await house.ask("POST", f"/admin/instances/{A}/drain")
    assert (await house.ask("DELETE", f"/admin/instances/{A}"))[0] == 204
    assert instance.closed
    assert not house.driver.supervisors


async def test_an_instance_can_be_paused_by_hand(house, first, second) -> None:
    body: dict[str, Any] = {"mode": "abort", "clear_cache": True}
    status, answer = await house.ask("POST", "/admin/pause", body)
    assert (status, answer["succeeded"]) == (200, 2)
    assert first.calls[1:] == second.calls[1:] == [("pause", "abort", True)]
    assert house.driver.supervisors[A].control.held
    status, answer = await house.ask("POST", "/admin/resume", {"mode": "abort"})
    assert (status, "mode" in answer["error"]["message"]) == (400, True)
    await house.ask("POST", "/admin/resume", {"instances": [A]})
    assert first.calls[-1] == "resume"
    assert second.calls[-1] != "resume"
    assert not house.driver.supervisors[A].control.held
    for wrong in ({"mode": "wait"}, {"moed": "keep"}):
        assert (await house.ask("POST", "/admin/pause", wrong))[0] == 400
    assert (await house.ask("POST", "/admin/pause", {"instances": ["c"]}))[0] == 404


async def test_weights_loaded_by_the_trainer_are_recorded(house, instance) -> None:
    body = {"version": 1, "applied": True, "wait": True}
    for _ in range(2):
        assert await house.ask("POST", "/admin/weights", body) == (200, {"version": 1})
        assert instance.calls == [("version", 0), ("version", 1)]
    body = {"version": 0, "applied": True}
    status, said = await house.ask("POST", "/admin/weights", body)
    assert (status, "versions must increase" in said["error"]["message"]) == (400, True)


async def test_weights_without_a_loading_method_are_refused(house) -> None:
    for body in (
        {"version": 1},
        {"version": 1, "applied": True, "reload": {"path": "/x"}},
        {"version": -1, "applied": True},
        {"version": 1, "reload": {"path": "/nowhere/{version}"}},
    ):
        status, said = await house.ask("POST", "/admin/weights", body)
        assert status == 400, said
    _, state = await house.ask("GET", "/admin/state")
    assert state["version"] == 0


async def test_state(house, instance) -> None:
    house.driver.submit(TokenPayload([1], {}), 1, 9)
    await instance.order()
    status, state = await house.ask("GET", "/admin/state")
    assert (status, state["requests"]["in_flight"], state["joined"]) == (200, 1, 1)
    assert state["calls"] == {"open": 0, "open_bytes": 0, "refused": 0}
    async with house.session.get(
        "/admin/state", headers={"Accept": "application/msgpack"}
    ) as response:
        assert msgspec.msgpack.decode(await response.read()) == state


async def test_a_pause_without_answer_blocks_nothing_else(house, first, second) -> None:
    """A pause that an instance never confirms blocks neither the others nor the gateway."""

    async def never(mode: str, clear_cache: bool) -> None:
        await asyncio.Event().wait()

    first.pause = never  # type: ignore[method-assign]
    asking = asyncio.create_task(house.ask("POST", "/admin/pause", {}))
    await until(lambda: second.calls)
    assert (await house.ask("GET", "/health"))[0] == 200
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.real_time
async def test_a_hanging_mount_blocks_neither_calls_nor_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, asked, over = threading.Event(), threading.Event(), threading.Event()

    def hang(folder: Path) -> None:
        asked.set()
        hanging.wait(60)
        over.set()

    monkeypatch.setattr(weights, "check_checkpoint", hang)
    async with House(Upstream(A)) as house:
        body = {"version": 1, "reload": {"path": str(tmp_path)}}
        asking = asyncio.create_task(house.ask("POST", "/admin/weights", body))
        await until(asked.is_set)
        assert (await house.ask("GET", "/health"))[0] == 200
        applied = {"version": 2, "applied": True, "wait": True}
        assert (await house.ask("POST", "/admin/weights", applied))[0] == 200
        asyncio.get_running_loop().call_later(0.1, asking.cancel)
    assert not over.is_set()
    hanging.set()


@pytest.mark.real_time
async def test_the_older_of_two_concurrent_publications_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, house
) -> None:
    going_on, asked = threading.Event(), threading.Event()

    def check(folder: Path) -> None:
        asked.set()
        going_on.wait(20)

    monkeypatch.setattr(weights, "check_checkpoint", check)
    body = {"version": 1, "reload": {"path": str(tmp_path)}}
    older = asyncio.create_task(house.ask("POST", "/admin/weights", body))
    await until(asked.is_set)
    newer = {"version": 2, "applied": True, "wait": True}
    assert (await house.ask("POST", "/admin/weights", newer))[0] == 200
    going_on.set()
    status, said = await older
    assert (status, "2" in said["error"]["message"]) == (400, True)
    _, state = await house.ask("GET", "/admin/state")
    assert state["version"] == 2
