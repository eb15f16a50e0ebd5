"""Which server a request goes to, and when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.config import parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.placement import NoPlace, Placement
from tests import virtual_net

SESSIONS = parse_policy("sessions", {"routing": {"use": "session_affinity"}})


def placement(*servers: str, slots: int = 1) -> Placement:
    made = Placement(SESSIONS.scheduler(1), slots=slots, kv_tokens=1000)
    made.add(servers)
    return made


async def turns(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_requests_are_spread_and_what_does_not_fit_waits_for_a_place() -> None:
    fleet = placement("a", "b")
    assert {await fleet.acquire("s", 10, 20), await fleet.acquire("t", 10, 20)} == {"a", "b"}
    third = asyncio.create_task(fleet.acquire("u", 10, 20))
    await turns()
    assert not third.done()
    fleet.release("b", "t")
    fleet.release("b", "s")
    assert await third == "b"
    assert (fleet.in_flight("a"), fleet.in_flight("b")) == (1, 1)


async def test_a_session_goes_where_it_was_until_sessions_are_forgotten() -> None:
    fleet = placement("a", "b", slots=8)
    first = await fleet.acquire("s", 10, 20)
    fleet.release(first, "s")
    for other in range(3):  # the other server is emptier
        await fleet.acquire(f"t{other}", 10, 20)
    loads = {server: fleet.in_flight(server) for server in "ab"}
    while fleet.in_flight(first) <= max(loads.values()):
        await fleet.acquire("s", 10, 20)
    assert await fleet.acquire("s", 10, 20) == first
    fleet.forget_sessions()
    assert await fleet.acquire("s", 10, 20) != first


async def test_a_server_that_is_removed_is_sent_nothing_more() -> None:
    fleet = placement("a", "b")
    await fleet.acquire("s", 10, 20)
    await fleet.acquire("t", 10, 20)
    waiting = asyncio.create_task(fleet.acquire("u", 10, 20))
    await turns()
    fleet.remove(["a"])
    await turns()
    assert fleet.servers == ["b"]
    assert not waiting.done()  # what ran on the other is its client's to ask for anew
    fleet.release("a", "s")  # too late: nothing happens
    fleet.release("a", "t")
    fleet.release("b", "s")
    fleet.release("b", "t")
    assert await waiting == "b"


async def test_a_server_that_comes_later_takes_what_waits() -> None:
    fleet = placement("a")
    await fleet.acquire("s", 10, 20)
    waiting = asyncio.create_task(fleet.acquire("t", 10, 20))
    await turns()
    fleet.add(["a", "b"])
    assert await waiting == "b"


async def test_a_client_that_gives_up_frees_its_place() -> None:
    fleet = placement("a")
    await fleet.acquire("s", 10, 20)
    waiting = asyncio.create_task(fleet.acquire("t", 10, 20))
    await turns()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    placed = asyncio.create_task(fleet.acquire("u", 10, 20))
    await turns()
    fleet.release("a", "s")
    placed.cancel()  # it has its server, and does not know yet
    await asyncio.gather(placed, return_exceptions=True)
    assert fleet.in_flight("a") == 0
    assert await fleet.acquire("v", 10, 20) == "a"


async def test_a_request_too_large_for_every_server_is_refused() -> None:
    with pytest.raises((NoPlace, CallerError)):
        await placement("a").acquire("s", 10, 5000)


SERVERS = st.sampled_from("abc")
DEEDS = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from("stu")),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("give up"), st.integers(0, 9)),
    st.tuples(st.just("add"), SERVERS),
    st.tuples(st.just("remove"), SERVERS),
)


@settings(max_examples=150)
@given(st.lists(DEEDS, max_size=40))
def test_no_request_waits_beside_a_free_place(deeds):
    async def test() -> None:
        scheduler = SESSIONS.scheduler(1)
        fleet = Placement(scheduler, slots=2, kv_tokens=1000)
        calls: list[tuple[str, asyncio.Task[str]]] = []
        for deed, what in deeds:
            if deed == "acquire":
                calls.append((what, asyncio.create_task(fleet.acquire(what, 10, 20))))
            elif deed == "add":
                fleet.add([what])
            elif deed == "remove":
                fleet.remove([what])
            elif calls:
                session, call = calls[what % len(calls)]
                if deed == "release" and call.done():
                    calls.remove((session, call))
                    fleet.release(call.result(), session)
                elif deed == "give up" and not call.done():
                    calls.remove((session, call))
                    call.cancel()
            await turns(2)
            scheduler.check_invariants()
            places = 2 * len(fleet.servers) - sum(map(fleet.in_flight, fleet.servers))
            waiting = sum(not call.done() for _, call in calls)
            assert places >= 0
            assert not (places and waiting)
        for _, call in calls:
            call.cancel()
        await asyncio.gather(*(call for _, call in calls), return_exceptions=True)

    virtual_net.run(test())
