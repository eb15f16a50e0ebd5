"""Orders go to the owner of a request; when a front leaves, its work continues elsewhere."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.core.model.model import DeliveredSample, Instance, Request
from rollout_sched.core.model.roles import FleetView
from rollout_sched.live.ports import RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload
from tests.link.stage import PROMPT, Stage, factory, run
from tests.live.scripted import until


def test_a_client_is_answered_by_its_own_front() -> None:
    async def scene() -> None:
        async with Stage(2) as stage:
            callers = [stage.ask(0), stage.ask(1)]
            await stage.instance.answer(0, [7])
            await stage.instance.answer(1, [8, 9])
            await until(lambda: all(caller.heard for caller in callers))
            assert {len(caller.response_ids) for caller in callers} == {1, 2}
            assert all(isinstance(caller.heard[0], DeliveredSample) for caller in callers)
            assert not stage.host.owned
            assert not len(stage.driver.front.payloads)

    run(scene)


def test_who_asks_the_host_itself_is_served_there() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            request = stage.driver.submit(TokenPayload(PROMPT, {}), 3, 9)
            order = await stage.instance.order()
            assert request == "run.1"
            assert order.id == "run-1"
            stage.driver.withdraw(request)
            await until(lambda: "abort" in str(stage.instance.calls))

    run(scene)


def test_groups_are_dealt_out_and_delivered_with_all_that_fronts_made() -> None:
    async def scene() -> None:
        async with Stage(2, batching={"use": "sync"}) as stage:
            stage.group("a", 2)
            assert [len(front.groups) for front in stage.host.fronts.values()] == [1, 0]
            stage.group("b", 1)
            assert [len(front.groups) for front in stage.host.fronts.values()] == [1, 1]
            for number in range(2):
                await stage.instance.answer(number, [7, number])
            await until(lambda: stage.batches)
            (action, payloads) = stage.batches[0]
            assert [sample.request for sample in action.samples] == ["a/0", "a/1"]
            assert [payload.response_ids for payload in payloads] == [[7, 0], [7, 1]]
            assert [payload.logprobs for payload in payloads] == [[-0.5, -0.5]] * 2
            await until(lambda: not len(stage.fronts[0].remote.front.payloads))

    run(scene)


def test_a_group_that_is_refused_is_nobodys() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            with pytest.raises(CallerError):
                stage.host.submit_group(GroupSubmitted("g", 0, 3, 9), factory(b""), b"")
            assert not stage.host.owned
            assert not stage.fronts[0].connected.groups

    run(scene)


def test_a_group_fails_with_the_reason_that_its_front_had() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            stage.group()
            await stage.instance.fail(0, RequestRejected("no such parameter"))
            await until(lambda: stage.failed)
            assert stage.failed == [("g", "no such parameter")]
            assert not stage.host.owned

    run(scene)


def test_what_a_dead_front_had_is_made_at_another_and_its_clients_are_gone() -> None:
    async def scene() -> None:
        async with Stage(2) as stage:
            stage.group()
            caller = stage.ask(0)
            await stage.instance.order(1)
            await stage.fronts[0].die()
            await until(lambda: "f0" not in stage.host.fronts)
            assert stage.host.is_owned(stage.fronts[1].connected, "g")
            await stage.instance.answer(2, [7])
            await until(lambda: stage.batches)
            assert caller.heard == []
            assert not stage.host.owned
            assert len(stage.instance.cancelled) == 2

    run(scene)


class BlockedByTheFirst:
    """A routing that blocks all requests until the first one is dispatched."""

    weighs_tokens = False

    def __init__(self) -> None:
        self.first = ""

    def load(self, instance: Instance) -> int:
        return 0

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        self.first = self.first or request.id
        return None if request.id == self.first else fleet.least()


def test_what_goes_out_as_the_clients_of_a_dead_front_go_holds_no_slot() -> None:
    async def scene() -> None:
        async with Stage(1, routing=f"{__name__}:BlockedByTheFirst") as stage:
            stage.ask(0)
            stage.ask(0)
            await until(lambda: stage.host.owned == 2)
            stage.host.disconnect(stage.fronts[0].connected)
            await until(lambda: not stage.scheduler.books.fleet.attempts)
            assert not stage.host.owned

    run(scene)


def test_with_no_front_left_the_host_makes_them_itself() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            stage.group()
            await stage.instance.order()
            await stage.fronts[0].die()
            await stage.instance.answer(1, [7])
            await until(lambda: stage.batches)

    run(scene)


def test_a_front_that_comes_again_under_its_name_is_a_new_one() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            first = stage.fronts[0]
            first.dead = True
            stage.fronts.append(stage.join("f0"))
            assert list(stage.host.fronts.values()) == [stage.fronts[1].connected]
            stage.host.disconnect(first.connected)
            assert len(stage.host.fronts) == 1
            await until(lambda: stage.fronts[1].remote.max_model_len == 10_000)

    run(scene)
