"""The driver: what the scheduler orders is done, what comes of it is told, no token is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action, Deliver
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceLost,
    RequestFailed,
    SubmissionsClosed,
    TokensArrived,
)
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    Gauges,
    InstanceError,
    Output,
    RequestRejected,
    WeightsUnknown,
)
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until

PROMPT = [1, 2, 3]
PATIENT = Settings(poll_s=1000.0)


class Client(TokenPayload):
    """A payload whose client notes what it got."""

    def __init__(self, **other: Any) -> None:
        super().__init__(PROMPT, {"logprobs": 0}, responder=self, **other)
        self.sample: DeliveredSample | None = None
        self.failure: tuple[str, Exception | None] | None = None
        self.request = ""

    def answer(self, sample: DeliveredSample) -> None:
        self.sample = sample

    def fail(self, reason: str, error: Exception | None) -> None:
        self.failure = (reason, error)


class Stage:
    """A driver with its instances, its journal, and what it delivered."""

    def __init__(self, *instances: Scripted, settings: Settings = PATIENT, **roles: Any) -> None:
        self.instances = instances
        self.journal: list[tuple[float, Event, list[Action]]] = []
        self.batches: list[tuple[Deliver, list[Any]]] = []
        self.failed: list[str] = []
        self.policy: dict[str, Any] = {"batching": "sync", **roles}
        self.scheduler = make_scheduler(**self.policy)
        self.driver = Driver(
            self.scheduler,
            settings=settings,
            observers=[lambda now, event, actions: self.journal.append((now, event, actions))],
            on_deliver=lambda deliver, payloads: self.batches.append((deliver, payloads)),
            on_group_failed=lambda group, error: self.failed.append(group),
        )

    async def __aenter__(self) -> Stage:
        for instance in self.instances:
            await self.driver.add_instance(instance)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        self.scheduler.check_invariants()
        again = make_scheduler(**self.policy)
        for now, event, actions in self.journal:
            assert again.handle(event, now) == actions, "the journal tells another story"
        assert again.view.anomalies == self.scheduler.view.anomalies

    def ask(self, *, max_tokens: int = 100, **other: Any) -> Client:
        client = Client(**other)
        client.request = self.driver.submit(client, len(PROMPT), max_tokens)
        return client

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for _, event, _ in self.journal if type(event) is kind]


async def test_a_group_is_delivered_complete() -> None:
    instance = Scripted()
    async with Stage(instance) as stage:
        stage.driver.submit_group(GroupSubmitted("a", 2, 3, 50), lambda index: Client())
        stage.driver.tell(BatchRequested())
        await instance.answer(1, [9])
        await instance.answer(0, [7, 8], "length")
        await until(lambda: stage.batches)
        deliver, payloads = stage.batches[0]
        made = {s.index: p.response_ids for s, p in zip(deliver.samples, payloads, strict=True)}
        assert made == {0: [7, 8], 1: [9]}


async def test_interrupted_request_continues_from_its_tokens() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    partial = {"use": "partial", "kv": "recompute", "at_update": "resubmit"}
    async with Stage(first, second, interruption=partial) as stage:
        client = stage.ask()
        await first.order()
        loaded: list[tuple[str, int]] = []

        async def load(instance: Scripted, version: int) -> None:
            loaded.append((instance.name, version))

        stage.driver.publish(1, load)
        await until(lambda: ("pause", "abort", True) in first.calls)
        await first.answer(0, [7, 8], "abort")
        await until(lambda: len(first.orders) == 2)
        assert sorted(loaded) == [("i0", 1), ("i1", 1)]
        resumed = await first.order(1)
        assert resumed.token_ids == [*PROMPT, 7, 8]
        assert (resumed.max_new_tokens, resumed.salt) == (98, "v1")
        await first.answer(1, [9])
        await until(lambda: client.sample)
        assert client.response_ids == [7, 8, 9]
        assert [s.version for s in client.sample.segments] == [0, 1]
        control = [call for call in first.calls[1:] if call[0] != "abort"]
        assert control == [("pause", "abort", True), ("version", 1), "resume"]


async def test_order_arriving_after_the_pause_is_aborted() -> None:
    """Before real vLLM under load a batch waited for 30 s: what had been sent just before a pause
    came after it, was aborted by nobody, and answered only when it was given up."""
    instance = Scripted()
    partial = {"use": "partial", "kv": "recompute", "at_update": "resubmit"}
    patient = Settings(poll_s=1000.0, abort_timeout_s=1000.0, control_timeout_s=1000.0)
    async with Stage(instance, settings=patient, interruption=partial) as stage:
        clients = [stage.ask(), stage.ask()]
        late = (await instance.order(1)).id

        async def load(client: Scripted, version: int) -> None: ...

        stage.driver.publish(1, load)
        await until(lambda: ("pause", "abort", True) in instance.calls)
        await instance.answer(0, [7], "abort")
        await until(lambda: ("abort", late) in instance.calls, 20)
        await instance.answer(1, [], "abort")
        await until(lambda: len(instance.orders) == 4, 20)
        for number in (2, 3):
            await instance.answer(number, [9])
        await until(lambda: all(client.sample for client in clients))
        assert sorted(client.response_ids for client in clients) == [[7, 9], [9]]


async def test_a_lost_instance_loses_nothing_that_was_streamed() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first, second) as stage:
        client = stage.ask(stream_every=2)
        await first.stream(0, [5, 6])
        stage.driver.fleet.lose("i0", "it died")
        resumed = await second.order()
        assert resumed.token_ids == [*PROMPT, 5, 6]
        await second.answer(0, [7])
        await until(lambda: client.sample)
        assert client.response_ids == [5, 6, 7]
        assert len(client.logprobs or ()) == 3
        assert len(first.cancelled) == 1


async def test_impossible_stream_is_discarded() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first, second, settings=Settings(stream_s=0.01)) as stage:
        client = stage.ask(stream_every=2)
        await first.stream(0, [5, 6])
        await until(lambda: stage.events(TokensArrived))
        await first.fail(0, AnswerUntrue("it sent more after the end of an answer"))
        assert (await second.order()).token_ids == PROMPT
        await second.answer(0, [7])
        await until(lambda: client.sample)
        assert client.response_ids == [7]


@pytest.mark.parametrize(
    "error", [ConnectionBroken("connection reset"), WeightsUnknown("its tokens carry 'default'")]
)
async def test_failed_instance_gets_no_requests_until_it_answers_a_poll(error: Exception) -> None:
    instance = Scripted()
    async with Stage(instance, settings=Settings(poll_s=0.01, misses=10**6)) as stage:
        client = stage.ask()
        await instance.order()
        instance.mute = True
        await instance.fail(0, error)
        await until(lambda: not stage.scheduler.state.fleet.attempts)
        await until(lambda: stage.scheduler.state.fleet.attempts)  # it has rested
        await asyncio.sleep(0.02)
        assert len(instance.orders) == 1
        instance.mute = False
        await instance.answer(1, [7])
        await until(lambda: client.sample)


async def test_tokens_streamed_after_a_restart_are_discarded() -> None:
    """What ran there before has lost its connection, so this came from the weights of a start."""
    first, second = Scripted("i0"), Scripted("i1")
    first.report = Gauges(0, 0, 0.0, started_at=1.0)
    async with Stage(first, second, settings=Settings(poll_s=0.01, stream_s=0.01)) as stage:
        client = stage.ask(stream_every=2)
        await first.stream(0, [5, 6])
        await until(lambda: stage.events(TokensArrived))
        first.report = Gauges(0, 0, 0.0, started_at=2.0)
        await until(lambda: stage.events(InstanceLost))
        assert (await second.order()).token_ids == PROMPT
        await second.answer(0, [7])
        await until(lambda: client.sample)
        assert client.response_ids == [7]


async def test_a_request_at_fault_fails_alone() -> None:
    instance = Scripted()
    async with Stage(instance) as stage:
        wrong, right = stage.ask(), stage.ask()
        rejected = RequestRejected("token id out of vocabulary", 400, b"{}")
        await instance.fail(0, rejected)
        await until(lambda: wrong.failure)
        assert wrong.failure == ("failed", rejected)
        assert right.failure is None
        await instance.answer(1, [4])
        await until(lambda: right.sample)


async def test_failed_group_is_reported() -> None:
    instance = Scripted()
    async with Stage(instance) as stage:
        stage.driver.submit_group(GroupSubmitted("a", 2, 3, 50), lambda index: Client())
        stage.driver.tell(SubmissionsClosed())
        stage.driver.tell(BatchRequested())
        await instance.fail(0, RequestRejected("too long"))
        await until(lambda: stage.failed)
        assert stage.failed == ["a"]
        with pytest.raises(CallerError):
            stage.driver.submit_group(GroupSubmitted("b", 1, 3, 50), lambda index: Client())


async def test_an_update_that_hangs_is_given_up_with_its_instance() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    settings = Settings(poll_s=0.01)
    async with Stage(first, second, settings=settings) as stage:
        hung = asyncio.Event()

        async def load(instance: Scripted, version: int) -> None:
            if instance is first and not hung.is_set():
                hung.set()
                await asyncio.sleep(60)

        stage.driver.publish(1, load)
        await hung.wait()
        first.dead = True
        await until(lambda: not stage.driver.supervisors["i0"].joined)
        first.dead = False
        await until(lambda: ("version", 1) in first.calls)


async def test_a_client_that_hangs_up_frees_the_slot() -> None:
    instance = Scripted(slots=1)
    async with Stage(instance) as stage:
        gone, waiting = stage.ask(), stage.ask()
        order = await instance.order()
        stage.driver.withdraw(gone.request)
        await until(lambda: ("abort", order.id) in instance.calls)
        await instance.answer(0, [1], "abort")
        await instance.answer(1, [2])
        await until(lambda: waiting.sample)
        assert gone.failure == ("withdrawn", None)


async def test_an_abort_that_overtakes_its_order_is_repeated() -> None:
    instance = Scripted()
    async with Stage(instance) as stage:
        client = stage.ask()
        order = await instance.order()
        stage.driver.withdraw(client.request)
        await until(lambda: instance.calls.count(("abort", order.id)) >= 2)
        await instance.answer(0, [], "abort")
        await until(lambda: not stage.driver.front.attempts.on("i0"))


async def test_an_attempt_that_does_not_stop_is_given_up() -> None:
    instance = Scripted(slots=1)
    settings = Settings(poll_s=1000.0, abort_timeout_s=0.3)
    async with Stage(instance, settings=settings) as stage:
        client = stage.ask()
        await instance.order()
        stage.driver.withdraw(client.request)
        await until(lambda: instance.cancelled)
        await until(lambda: stage.events(RequestFailed))
        assert not stage.driver.front.attempts.on("i0")


async def test_an_abort_nobody_asked_for_is_a_failure() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first, second) as stage:
        client = stage.ask()
        await first.answer(0, [], "abort")
        await second.answer(0, [3])
        await until(lambda: client.sample)
        assert len(stage.events(RequestFailed)) == 1


async def test_missing_log_probabilities_are_a_failure() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first, second) as stage:
        client = stage.ask()
        order = await first.order()
        first._answers[order.id].set_result(Output([1, 2], [-1.0], "stop"))
        await second.answer(0, [3])
        await until(lambda: client.sample)
        assert client.response_ids == [3]


async def test_removed_and_drained() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first, second) as stage:
        one, two = stage.ask(), stage.ask()
        await first.order()
        await second.order()
        draining = asyncio.create_task(stage.driver.remove_instance("i0", drain=True))
        await asyncio.sleep(0.01)
        assert not draining.done()
        await first.answer(0, [1])
        await draining
        assert first.closed
        assert one.sample is not None
        await stage.driver.add_instance(Scripted("i2"))
        await stage.driver.remove_instance("i1")
        assert two.sample is None
        client = stage.driver.supervisors["i2"].client
        await client.answer(0, [5])
        await until(lambda: two.sample)
        with pytest.raises(CallerError, match="no instance 'i1'"):
            await stage.driver.remove_instance("i1")


async def test_requests_sent_during_a_loss_go_elsewhere() -> None:
    """What its streams had brought is told first, and the scheduler may act on that."""
    first, second = Scripted("i0"), Scripted("i1")
    async with Stage(first) as stage:
        stage.ask(stream_every=1)
        await first.stream(0, [5])
        late: list[Client] = []
        stage.driver.pump.watch(lambda event: late.append(stage.ask()), TokensArrived)
        await stage.driver.remove_instance("i0")
        assert stage.driver.broken is None
        assert len(stage.driver.front.attempts) == 0
        await stage.driver.add_instance(second)
        await second.answer(0, [6])
        await second.answer(1, [7])
        await until(lambda: late[0].sample)
        assert not stage.scheduler.state.anomalies


async def test_weights_that_cannot_be_loaded_make_an_instance_unfit_until_restarted() -> None:
    first, second = Scripted("i0"), Scripted("i1")
    settings = Settings(poll_s=0.01)
    partial = {"use": "partial", "at_update": "resubmit"}
    async with Stage(first, second, settings=settings, interruption=partial) as stage:
        client = stage.ask()
        await first.order()

        async def load(instance: Scripted, version: int) -> None:
            if instance is first and first.description.started_at == 1.0:
                raise InstanceError("500 from reload_weights")

        stage.driver.publish(1, load)
        await until(lambda: "pause" in str(first.calls))
        await first.answer(0, [4], "abort")
        assert (await second.order()).token_ids == [*PROMPT, 4]
        await second.answer(0, [5])
        await until(lambda: client.sample)
        assert client.response_ids == [4, 5]
        await asyncio.sleep(0.05)
        assert not stage.driver.supervisors["i0"].joined
        first.describes(started_at=2.0)
        await until(lambda: stage.driver.supervisors["i0"].joined)
        await until(lambda: ("version", 1) in first.calls)


async def test_instance_idle_before_may_forget_requests() -> None:
    instance = Scripted()
    instance.report = Gauges(0, 0, 0.0, generated_tokens=10)
    settings = Settings(poll_s=0.01, forgotten_s=0.05, abort_timeout_s=0.05)
    async with Stage(instance, settings=settings) as stage:
        await asyncio.sleep(0.1)
        client = stage.ask()
        await instance.order(1)
        await instance.answer(1, [6])
        await until(lambda: client.sample)


async def test_an_instance_that_is_not_up_yet_joins_when_it_is() -> None:
    late = Scripted()
    late.dead = True
    async with Stage(settings=Settings(poll_s=0.01)) as stage:
        with pytest.raises(InstanceError, match="refused"):
            await stage.driver.add_instance(late)
        assert not stage.driver.supervisors
        assert await stage.driver.add_instance(late, patient=True) is None
        assert "refused" in stage.driver.supervisors["i0"].reason
        client = stage.ask()
        late.dead = False
        await late.answer(0, [6])
        await until(lambda: client.sample)
        assert stage.driver.supervisors["i0"].reason == ""
        assert "resume" not in late.calls


async def test_rejoined_instance_is_still_drained() -> None:
    instance = Scripted()
    async with Stage(instance, settings=Settings(poll_s=0.01)) as stage:
        instance.dead = True
        await until(lambda: not stage.driver.supervisors["i0"].joined)
        instance.dead = False
        await until(lambda: stage.driver.supervisors["i0"].joined)
        client = stage.ask()
        await instance.order()
        leaving = asyncio.create_task(stage.driver.remove_instance("i0", drain=True))
        await asyncio.sleep(0.03)
        assert not leaving.done()
        await instance.answer(0, [6])
        await leaving
        assert client.response_ids == [6]


async def test_a_pause_by_hand_outlasts_an_update_and_is_no_stall() -> None:
    instance = Scripted()
    settings = Settings(poll_s=0.01, stall_s=0.03)
    partial = {"use": "partial", "kv": "retain", "at_update": "in_place"}
    async with Stage(instance, settings=settings, interruption=partial) as stage:
        supervisor = stage.driver.supervisors["i0"]
        client = stage.ask()
        await instance.order()
        instance.report = Gauges(1, 0, 0.5, generated_tokens=10)
        await supervisor.control.hold("keep", False)

        async def load(instance: Scripted, version: int) -> None:
            return None

        stage.driver.publish(1, load)
        await until(lambda: ("version", 1) in instance.calls)
        await asyncio.sleep(0.1)
        assert supervisor.joined
        assert "resume" not in instance.calls
        await supervisor.control.release()
        assert instance.calls[-1] == "resume"
        await instance.answer(0, [6])
        await until(lambda: client.sample)
