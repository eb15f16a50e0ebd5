"""The connected processes generate a trainer's groups; nothing is lost when a process is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import GroupSubmitted, InstanceLost, TokensArrived
from rollout_sched.core.model.model import DeliveredSample, Instance, Request
from rollout_sched.core.model.roles import FleetView, Routing
from rollout_sched.link.front import RemoteFront
from rollout_sched.link.host import LOSING, Hub
from rollout_sched.link.protocol import read_accepted
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient, RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.samples import Batch, Prompt, Tool
from tests import virtual_net
from tests.link.fixtures import PROMPT as PROMPT_FLEET_ATTEMPTS
from tests.link.fixtures import PROMPT as PROMPT_HOST
from tests.link.fixtures import Stage, factory
from tests.link.wires import Shared
from tests.live.scripted import Scripted, until

PROMPT = Prompt("a", [1, 2], 1, 9)
SETTINGS = Settings(poll_s=1000.0, stream_s=0.01)


class Fleet:
    """A live scheduler with its hub, one instance, and fronts that get orders at once."""

    def __init__(self, store: Path | None = None) -> None:
        options = RunOptions(prompts_per_step=1, stream_every=2, store=store)
        policy = load_policy("april")
        self.live = LiveScheduler(policy, options, settings=SETTINGS)
        self.hub = Hub(self.live)
        self.instance = Scripted()
        self.fronts: dict[str, RemoteFront] = {}

    def join(self, name: str) -> RemoteFront:
        frames: list[bytes] = []
        accepted = read_accepted(self.hub.connect(name, lambda frame: take(frame)))
        instances: dict[str, InstanceClient] = {"i0": self.instance}
        front = self.fronts[name] = RemoteFront(
            name,
            accepted.epoch,
            accepted.epoch,
            send=lambda frame: self.hub.receive(name, frame),
            clients=Shared(instances),
            make=accepted.factory,
            settings=accepted.settings,
            on_broken=lambda error: frames.append(repr(error).encode()),
        )
        take = front.receive
        return front

    def submit(self, *prompts: Prompt, tool: Tool | None = None) -> None:
        self.live.trainer.submit(prompts, tool)
        self.ask()

    def ask(self, acknowledged: int | None = None) -> None:
        self.asked = asyncio.ensure_future(self.live.trainer.next_batch(acknowledged))

    async def batch(self) -> Batch:
        batch = await self.asked
        assert batch is not None
        return batch


@asynccontextmanager
async def fleet(*names: str, store: Path | None = None) -> AsyncIterator[Fleet]:
    made = Fleet(store)
    await made.live.driver.add_instance(made.instance)
    for name in names:
        made.join(name)
    try:
        yield made
    finally:
        for front in made.fronts.values():
            await front.close()
        await made.live.close()


async def test_groups_run_at_the_front_that_has_their_prompt() -> None:
    async with fleet("f0", "f1") as made:
        made.submit(PROMPT, Prompt("b", [3], 1, 9))
        await until(lambda: len(made.instance.orders) == 2)
        assert [front["groups"] for front in made.hub.state().values()] == [1, 1]
        assert not len(made.live.driver.front.attempts), "no attempt is in flight here"
        assert made.live.state()["fronts"] == made.hub.state()
        await made.instance.answer(0, [5, 6])
        await made.instance.answer(1, [7])
        first = await made.batch()
        made.ask(first.number)
        second = await made.batch()
        assert {batch.samples[0].uid for batch in (first, second)} == {"a", "b"}
        assert [front["groups"] for front in made.hub.state().values()] == [0, 0]


async def tool(turn: Any) -> None:
    return None


@pytest.mark.parametrize(("fronts", "with_tool"), [((), None), (("f0",), tool)])
async def test_groups_without_fronts_or_with_tools_run_at_the_host(
    fronts: tuple[str, ...], with_tool: Tool | None
) -> None:
    async with fleet(*fronts) as made:
        made.submit(PROMPT, tool=with_tool)
        await until(lambda: len(made.live.driver.front.attempts) == 1)
        assert not any(front["groups"] for front in made.hub.state().values())


async def test_a_front_that_dies_costs_no_token_that_it_has_reported() -> None:
    async with fleet("f0", "f1") as made:
        made.submit(PROMPT)
        await made.instance.stream(0, [5, 6])
        await until(lambda: made.live.driver.front.payloads.get("a/0") is not None)
        made.hub.disconnect("f0")
        order = await made.instance.order(1)
        assert order.token_ids == [1, 2, 5, 6]
        await made.instance.answer(1, [7])
        assert (await made.batch()).samples[0].response_ids == [5, 6, 7]


def test_a_store_has_what_fronts_have_streamed(tmp_path: Path) -> None:
    async def first() -> None:
        async with fleet("f0", store=tmp_path / "s") as made:
            made.submit(PROMPT)
            await made.instance.stream(0, [5, 6])
            await until(lambda: made.live.driver.front.payloads.get("a/0") is not None)

    async def second() -> None:
        async with fleet("f0", store=tmp_path / "s") as made:
            made.ask()
            order = await made.instance.order(0)
            assert order.token_ids == [1, 2, 5, 6]
            await made.instance.answer(0, [7])
            assert (await made.batch()).samples[0].response_ids == [5, 6, 7]

    virtual_net.run(first())
    virtual_net.run(second())


async def test_reconnected_front_replaces_the_earlier_one() -> None:
    async with fleet("f0") as made:
        before = made.fronts["f0"]
        made.submit(PROMPT)
        await made.instance.order(0)
        await before.close()
        made.join("f0")
        await made.instance.answer(1, [7])
        assert (await made.batch()).samples[0].response_ids == [7]
        made.hub.receive("nobody", b"a frame of a front that has gone")


def test_every_start_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    epochs: set[str] = set()

    async def scene() -> None:
        async with fleet(store=tmp_path / "s") as made:
            epochs.add(made.hub.epoch)

    virtual_net.run(scene())
    virtual_net.run(scene())
    assert len(epochs) == 2


@pytest.mark.parametrize("policy", ["partial_rollout"])
async def test_a_front_is_told_what_it_needs(policy: str) -> None:
    async with fleet() as made:
        accepted = read_accepted(made.hub.connect("f0", lambda frame: None))
        assert (accepted.epoch, accepted.settings) == (made.hub.epoch, SETTINGS)
        assert accepted.stream_every == 2
        assert accepted.keeps_partial


async def test_a_client_is_answered_by_its_own_front() -> None:
    async with Stage(2) as stage:
        callers = [stage.ask(0), stage.ask(1)]
        await stage.instance.answer(0, [7])
        await stage.instance.answer(1, [8, 9])
        await until(lambda: all(caller.heard for caller in callers))
        assert {len(caller.response_ids) for caller in callers} == {1, 2}
        assert all(isinstance(caller.heard[0], DeliveredSample) for caller in callers)
        assert not stage.host.owned
        assert not len(stage.driver.front.payloads)


async def test_request_at_the_host_runs_at_the_host() -> None:
    async with Stage(1) as stage:
        request = stage.driver.submit(TokenPayload(PROMPT_HOST, {}), 3, 9)
        order = await stage.instance.order()
        assert request == "run.1"
        assert order.id == "run-1"
        stage.driver.withdraw(request)
        await until(lambda: "abort" in str(stage.instance.calls))


async def test_groups_are_dealt_out_and_delivered_with_all_that_fronts_made() -> None:
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


async def test_refused_group_has_no_owner() -> None:
    async with Stage(1) as stage:
        with pytest.raises(CallerError):
            stage.host.submit_group(GroupSubmitted("g", 0, 3, 9), factory(b""), b"")
        assert not stage.host.owned
        assert not stage.fronts[0].connected.groups


async def test_a_group_fails_with_the_reason_that_its_front_had() -> None:
    async with Stage(1) as stage:
        stage.group()
        await stage.instance.fail(0, RequestRejected("no such parameter"))
        await until(lambda: stage.failed)
        assert stage.failed == [("g", "no such parameter")]
        assert not stage.host.owned


async def test_groups_of_a_dead_front_move_and_its_clients_are_dropped() -> None:
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


class BlockedByTheFirst(Routing):
    """A routing that blocks all requests until the first one is dispatched."""

    weighs_tokens = False

    def __init__(self) -> None:
        self.first = ""

    def load(self, instance: Instance) -> int:
        return 0

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        self.first = self.first or request.id
        return None if request.id == self.first else fleet.least()


async def test_requests_of_a_dead_front_hold_no_slot() -> None:
    async with Stage(1, routing=f"{__name__}:BlockedByTheFirst") as stage:
        stage.ask(0)
        stage.ask(0)
        await until(lambda: stage.host.owned == 2)
        stage.host.disconnect(stage.fronts[0].connected)
        await until(lambda: not stage.scheduler.state.fleet.attempts)
        assert not stage.host.owned


async def test_host_runs_groups_when_no_front_is_left() -> None:
    async with Stage(1) as stage:
        stage.group()
        await stage.instance.order()
        await stage.fronts[0].die()
        await stage.instance.answer(1, [7])
        await until(lambda: stage.batches)


async def test_a_front_that_comes_again_under_its_name_is_a_new_one() -> None:
    async with Stage(1) as stage:
        first = stage.fronts[0]
        first.dead = True
        stage.fronts.append(stage.join("f0"))
        assert list(stage.host.fronts.values()) == [stage.fronts[1].connected]
        stage.host.disconnect(first.connected)
        assert len(stage.host.fronts) == 1
        await until(lambda: stage.fronts[1].remote.max_model_len == 10_000)


async def test_host_lists_attempts_of_all_fronts() -> None:
    async with Stage(2) as stage:
        stage.driver.submit(TokenPayload(PROMPT_FLEET_ATTEMPTS, {}), 3, 9)
        stage.ask(0)
        stage.ask(1)
        await stage.instance.order(2)
        attempts = stage.driver.fleet.attempts
        assert [one.dispatch.attempt for one in attempts.on("i0")] == [1, 2, 3]
        assert all(one.reads for one in attempts.on("i0"))
        assert attempts.on("i1") == []


async def test_attempt_is_stopped_at_its_front() -> None:
    async with Stage(1) as stage:
        stage.driver.submit(TokenPayload(PROMPT_FLEET_ATTEMPTS, {}), 3, 9)
        stage.ask()
        await stage.instance.order(1)
        for one in stage.driver.fleet.attempts.on("i0"):
            stage.driver.fleet.attempts.stop(one.dispatch.attempt, "it stands still")
        await until(lambda: len([c for c in stage.instance.calls if c[0] == "abort"]) >= 2)
        aborted = [call for call in stage.instance.calls if call[0] == "abort"]
        assert {call[1] for call in aborted} == {"run-1", "run-2"}


async def test_a_pause_that_aborts_waits_for_all_fronts() -> None:
    async with Stage(2) as stage:
        stage.ask(0)
        stage.ask(1)
        await stage.instance.order(1)
        await stage.driver.fleet.attempts.answered("i0")
        assert {call[1] for call in stage.instance.calls if call[0] == "abort"} == {
            "run-1",
            "run-2",
        }
        assert not stage.driver.fleet.attempts.on("i0") or len(stage.instance.orders) > 2


async def test_loss_is_reported_after_all_fronts_reported_their_streams() -> None:
    async with Stage(2) as stage:
        seen: list[object] = []
        stage.driver.pump.observers.append(lambda now, event, actions: seen.append(event))
        stage.ask(0)
        stage.ask(1)
        await stage.instance.order(1)
        await stage.instance.stream(0, [7, 8])
        await stage.instance.stream(1, [7])
        stage.driver.fleet.lose("i0", "it died")
        stage.driver.fleet.lose("i0", "it died again")
        assert stage.driver.versions.gate("i0") == LOSING
        await until(lambda: any(isinstance(event, InstanceLost) for event in seen))
        assert stage.driver.versions.gate("i0") == ""
        brought = [event.tokens for event in seen if isinstance(event, TokensArrived)]
        assert sorted(brought) == [1, 2]
        assert sum(isinstance(event, InstanceLost) for event in seen) == 1
        assert not stage.scheduler.state.fleet.attempts


async def test_dead_front_does_not_delay_a_loss() -> None:
    async with Stage(1) as stage:
        stage.ask(0)
        await stage.instance.order()
        stage.fronts[0].dead = True  # it receives nothing from now on
        stage.driver.fleet.lose("i0", "it died")
        assert stage.driver.view.instance("i0") is not None
        stage.host.disconnect(stage.fronts[0].connected)
        assert stage.driver.view.instance("i0") is None


async def test_tokens_streamed_before_an_unnoticed_restart_are_discarded() -> None:
    async with Stage(1) as stage:
        caller = stage.ask()
        await stage.instance.order()
        await stage.instance.stream(0, [7, 8])
        (one,) = stage.driver.fleet.attempts.on("i0")
        stage.driver.fleet.attempts.reject_streamed(one.dispatch.attempt)
        await stage.instance.answer(1, [9])
        await until(lambda: caller.heard)
        assert caller.response_ids == [9]
