"""What happens, while somebody looks."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.gateway.control_plane import live as live_watch
from rollout_sched.integrations.gateway.control_plane.app import WATCH
from rollout_sched.integrations.gateway.control_plane.live import LiveWatch
from tests.integrations.gateway.control_plane.test_trainer_api import prompt
from tests.integrations.gateway.gateway_fixture import House
from tests.live.scripted import until


def watch_of(house: House) -> LiveWatch:
    return house.service.app[WATCH]


async def test_nothing_is_folded_without_watchers(house) -> None:
    before = list(house.driver.pump.observers)
    watch = watch_of(house)
    assert watch._fold is None
    watch.state()
    assert watch._fold is not None
    assert len(house.driver.pump.observers) == len(before) + 1
    watch.close()
    assert house.driver.pump.observers == before


async def test_the_fold_lingers_for_returning_watchers(
    monkeypatch: pytest.MonkeyPatch, house
) -> None:
    monkeypatch.setattr(live_watch, "LINGER_S", 0.01)
    watch = watch_of(house)
    states = watch.stream()
    await anext(states)
    assert watch.streams == 1
    await asyncio.sleep(0.05)
    assert watch._fold is not None, "somebody looks"
    await states.aclose()
    assert watch.streams == 0
    await until(lambda: watch._fold is None)


async def test_a_stream_tells_each_attempt_once_as_it_begins_and_once_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, house, instance
) -> None:
    monkeypatch.setattr(live_watch, "EACH_S", 0.0)
    monkeypatch.setattr(live_watch, "KEPT_S", 0.0)
    states = watch_of(house).stream()
    first = await anext(states)
    assert (first["anew"], first["attempts"]) == (True, [])
    await house.ask("POST", "/rollout/v1/groups", [prompt("a")])
    asking = asyncio.create_task(house.ask("POST", "/rollout/v1/batches/next"))
    await instance.order()
    second = await anext(states)
    [begun] = second["attempts"]
    assert (begun.group, begun.spans, second["anew"]) == ("a", (), False)
    await instance.answer(0, [5, 6])
    await asking
    third = await anext(states)
    [ended] = third["attempts"]
    assert (ended.attempt, ended.spans[0].tokens) == (begun.attempt, 2)
    assert (await anext(states))["attempts"] == []
    assert third["steps"][0]["samples"] == 1
    await states.aclose()


async def test_viewers_of_one_moment_get_the_same_document(house) -> None:
    watch = watch_of(house)
    first = watch.state()
    states = watch.stream()
    streamed = await anext(states)
    assert watch.state() is first
    assert {name: streamed[name] for name in first} == first
    await asyncio.sleep(live_watch.KEPT_S)
    assert watch.state()["now"] > first["now"]
    await states.aclose()


async def test_a_stream_ends_with_the_gateway(house) -> None:
    watch = watch_of(house)
    states = watch.stream()
    await anext(states)
    watch.close()
    with pytest.raises(StopAsyncIteration):
        await anext(states)
