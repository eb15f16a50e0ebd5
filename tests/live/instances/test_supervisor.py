"""The supervisor: nobody waits for what was forgotten, and pauses last, whoever made them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.events import InstanceLost
from rollout_sched.live.instances.membership import MembershipState
from rollout_sched.live.ports import ConnectionBroken, Gauges, InstanceError
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted, until
from tests.live.supervised import Fleet
from tests.live.test_driver import PROMPT, Stage

QUICK = Settings(poll_s=0.01, forgotten_s=0.05, abort_timeout_s=0.1)


class Busy(Scripted):
    """It makes tokens all the time, of whomever; `here` of our orders are known to it."""

    def __init__(self, name: str = "i0", **other: Any) -> None:
        super().__init__(name, **other)
        self.here = 0
        self.waiting = 0
        self._made = 0

    async def gauges(self) -> Gauges:
        await super().gauges()
        self._made += 1
        return Gauges(self.here, self.waiting, 0.5, generated_tokens=self._made)

    @property
    def aborted(self) -> list[str]:
        return [call[1] for call in self.calls if call[0] == "abort"]


def pausable(instance: Scripted, **other: Any) -> Scripted:
    known = frozenset({"generate", "pause"})
    instance.describes(capabilities=known, **other)
    return instance


def restart(instance: Scripted, **other: Any) -> None:
    again = instance.description.started_at + 1.0
    instance.describes(started_at=again, **other)


class TestForgotten:
    async def test_busy_instance_is_asked_for_its_oldest_requests_first(self) -> None:
        """It tells of two where we wait for three. The oldest is there and goes on from what it
        brings; the next does not answer and is made again."""
        instance = Busy()
        async with Stage(instance, settings=QUICK) as stage:
            oldest, dead, young = [], [], []
            for which in (oldest, dead, young):
                which.append(stage.ask())
                await asyncio.sleep(0.002)
            await instance.order(2)
            names = list(instance.orders)
            instance.here = 2
            await until(lambda: names[0] in instance.aborted)
            assert names[2] not in instance.aborted
            await instance.answer(0, [7, 8], "abort")
            resumed = await instance.order(3)
            assert resumed.token_ids == [*PROMPT, 7, 8]
            again = await instance.order(4)
            assert names[1] in instance.cancelled
            assert names[2] not in instance.aborted
            assert again.token_ids == PROMPT
            instance.here = 3
            for number, tokens in ((2, [1]), (3, [2]), (4, [3])):
                await instance.answer(number, tokens)
            await until(lambda: oldest[0].sample and dead[0].sample and young[0].sample)
            assert oldest[0].response_ids == [7, 8, 2]
            assert dead[0].response_ids == [3]
            assert not stage.events(InstanceLost)

    async def test_empty_abort_of_a_forgotten_request_is_no_failure(self) -> None:
        instance = Busy()
        async with Stage(instance, settings=QUICK) as stage:
            client = stage.ask()
            await instance.order()
            await until(lambda: instance.aborted)
            instance.here = 1
            await instance.answer(0, [], "abort")
            await instance.answer(1, [6])
            await until(lambda: client.sample)
            assert client.sample is not None
            assert not stage.driver.supervisors["i0"].reason
            assert not [e for _, e, _ in stage.journal if type(e).__name__ == "RequestFailed"]

    async def test_a_stream_whose_client_does_not_read_it_is_not_waited_for(self) -> None:
        """It may have ended at the instance long before its client has taken it."""

        class HeldBack:
            held_back = True

            def cancel(self) -> None: ...

        instance = Busy()
        async with Stage(instance, settings=QUICK) as stage:
            client = stage.ask()
            await instance.order()
            (running,) = stage.driver.front.attempts.on("i0")
            usual, running.attempting = running.attempting, HeldBack()
            await asyncio.sleep(0.2)
            assert instance.aborted == []
            running.attempting = usual
            await instance.answer(0, [6])
            await until(lambda: client.sample)

    async def test_an_abort_that_hangs_or_breaks_keeps_nobody_waiting(self) -> None:
        class Deaf(Scripted):
            async def abort(self, order_id: str) -> None:
                if len(self.orders) == 1:
                    await asyncio.sleep(60)
                raise KeyError(order_id)

        instance = Deaf()
        instance.report = Gauges(0, 0, 0.0, generated_tokens=10)
        async with Stage(instance, settings=QUICK) as stage:
            client = stage.ask()
            await instance.order(2)
            await instance.answer(2, [6])
            await until(lambda: client.sample)

    @pytest.mark.parametrize(
        ("here", "waiting"),
        [(1, 2), (3, 0), (40, 10)],  # queued or preempted; all run; others use it too
    )
    async def test_reported_requests_are_not_aborted(self, here: int, waiting: int) -> None:
        instance = Busy()
        instance.here, instance.waiting = here, waiting
        async with Stage(instance, settings=QUICK) as stage:
            clients = [stage.ask() for _ in range(3)]
            await instance.order(2)
            await asyncio.sleep(0.3)
            assert instance.aborted == []
            for number in range(3):
                await instance.answer(number, [6])
            await until(lambda: all(client.sample for client in clients))

    async def test_gauges_that_stand_still_prove_nothing(self) -> None:
        """In a long step of the engine what came since it began is not counted yet."""
        instance = Scripted()
        instance.report = Gauges(1, 0, 0.5, generated_tokens=10)
        async with Stage(instance, settings=QUICK) as stage:
            clients = [stage.ask() for _ in range(3)]
            await instance.order(2)
            await asyncio.sleep(0.3)
            assert not [call for call in instance.calls if call[0] == "abort"]
            for number in range(3):
                await instance.answer(number, [6])
            await until(lambda: all(client.sample for client in clients))

    async def test_a_long_prompt_gets_the_time_that_it_may_take(self) -> None:
        """In its first step the gauges of an idle instance do not tell of it."""
        instance = Scripted()
        slow = msgspec.structs.replace(QUICK, prefill_rate=len(PROMPT) / 0.5)
        async with Stage(instance, settings=slow) as stage:
            client = stage.ask()
            await instance.order()
            await asyncio.sleep(0.3)
            assert not [call for call in instance.calls if call[0] == "abort"]
            await instance.answer(0, [6])
            await until(lambda: client.sample)


class TestStandingStill:
    async def test_a_stream_that_brings_nothing_while_others_do(self) -> None:
        instance = Busy()
        instance.here = 2
        settings = Settings(poll_s=0.01, stall_s=0.1, abort_timeout_s=0.05)
        async with Stage(instance, settings=settings) as stage:
            client, other = stage.ask(stream_every=1), stage.ask(stream_every=1)
            await instance.stream(0, [7])

            async def go_on() -> None:
                while True:
                    await instance.stream(1, [1])
                    await asyncio.sleep(0.01)

            going_on = asyncio.create_task(go_on())
            assert (await instance.order(2)).token_ids == [*PROMPT, 7]
            assert set(instance.aborted) == {next(iter(instance.orders))}
            going_on.cancel()
            await instance.answer(1, [1])
            await instance.answer(2, [8])
            await until(lambda: client.sample and other.sample)
            assert client.response_ids == [7, 8]
            assert not stage.events(InstanceLost)

    async def test_a_prefill_that_goes_on_is_progress(self) -> None:
        instance = Scripted()
        settings = Settings(poll_s=0.01, stall_s=0.05)
        async with Stage(instance, settings=settings) as stage:
            client = stage.ask()
            await instance.order()
            for step in range(30):
                instance.report = Gauges(1, 0, step / 100, generated_tokens=10)
                await asyncio.sleep(0.01)
            assert not stage.events(InstanceLost)
            await instance.answer(0, [6])
            await until(lambda: client.sample)

    async def test_a_prefill_in_one_step_gets_the_time_of_its_prompt(self) -> None:
        instance = Scripted()
        instance.report = Gauges(1, 0, 0.5, generated_tokens=10)
        settings = Settings(poll_s=0.01, stall_s=0.05, prefill_rate=len(PROMPT) / 0.3)
        async with Stage(instance, settings=settings) as stage:
            stage.ask()
            await instance.order()
            await asyncio.sleep(0.2)
            assert not stage.events(InstanceLost)
            await until(lambda: stage.events(InstanceLost))


class TestPauses:
    async def test_foreign_pause_is_respected_until_its_end(self) -> None:
        """A second gateway must not wake what the first has paused to load weights."""
        instance = pausable(Scripted(), paused=True)
        async with Stage(settings=QUICK) as stage:
            with pytest.raises(InstanceError, match="paused"):
                await stage.driver.add_instance(instance)
            assert await stage.driver.add_instance(instance, patient=True) is None
            supervisor = stage.driver.supervisors["i0"]
            await asyncio.sleep(0.05)
            assert not supervisor.joined
            assert "i0/resume" in supervisor.reason
            assert "resume_paused" in supervisor.reason
            assert instance.calls == []
            instance.describes(paused=False)
            await until(lambda: supervisor.joined)
            assert "resume" not in instance.calls

    async def test_pause_left_by_our_update_is_resumed(self) -> None:
        instance = pausable(Scripted(), paused=False)
        partial = {"use": "partial", "kv": "retain", "at_update": "in_place"}
        async with Stage(instance, settings=QUICK, interruption=partial) as stage:
            supervisor = stage.driver.supervisors["i0"]
            client = stage.ask()
            await instance.order()
            loading = asyncio.Event()

            async def load(instance: Scripted, version: int) -> None:
                loading.set()
                if version == 1 and instance.description.paused is False:
                    await asyncio.sleep(60)

            stage.driver.publish(1, load)
            await loading.wait()
            instance.dead = True
            await until(lambda: not supervisor.joined)
            instance.describes(paused=True)
            instance.dead = False
            await until(lambda: supervisor.joined)
            assert "resume" in instance.calls
            await instance.answer(1, [6])
            await until(lambda: client.sample)

    async def test_failure_during_a_pause_delays_nothing_afterwards(self) -> None:
        """It answered a poll meanwhile; the next one is an hour away."""
        instance = pausable(Scripted(), paused=False)
        partial = {"use": "partial", "kv": "retain", "at_update": "in_place"}
        settings = msgspec.structs.replace(QUICK, poll_s=3600.0)
        async with Stage(instance, settings=settings, interruption=partial) as stage:
            client = stage.ask()
            await instance.order()
            loading, loaded = asyncio.Event(), asyncio.Event()

            async def load(instance: Scripted, version: int) -> None:
                loading.set()
                await loaded.wait()

            stage.driver.publish(1, load)
            await loading.wait()
            await instance.fail(0, ConnectionBroken("reset"))
            await asyncio.sleep(5.0)
            loaded.set()
            await instance.answer(1, [6])
            await until(lambda: client.sample)

    async def test_instance_restarted_between_polls_is_held_again(self) -> None:
        """Nobody would notice otherwise: what is paused is not judged by its gauges."""
        instance = pausable(Scripted(), paused=False)
        instance.report = Gauges(0, 0, 0.0, started_at=1.0)
        async with Stage(instance, settings=QUICK) as stage:
            supervisor = stage.driver.supervisors["i0"]
            await supervisor.control.hold("keep", False)
            instance.calls.clear()
            restart(instance)
            instance.report = Gauges(0, 0, 0.0, started_at=2.0)
            await until(lambda: stage.events(InstanceLost))
            await until(lambda: supervisor.joined)
            assert instance.calls == [("pause", "keep", False), ("version", 0)]
            assert supervisor.control.held

    async def test_hold_released_while_joining_ends(self) -> None:
        """It was paused as held a moment before, and nobody would resume it any more."""
        instance = pausable(Scripted(), paused=False)
        async with Stage(instance, settings=QUICK) as stage:
            supervisor = stage.driver.supervisors["i0"]
            await supervisor.control.hold("keep", False)
            instance.dead = True
            await until(lambda: not supervisor.joined)
            restart(instance)
            labelling, may = asyncio.Event(), asyncio.Event()
            usual = instance.set_version

            async def slowly(version: int) -> None:
                labelling.set()
                await may.wait()
                await usual(version)

            instance.set_version = slowly  # type: ignore[method-assign]
            instance.dead = False
            await labelling.wait()
            releasing = asyncio.create_task(supervisor.control.release())
            await asyncio.sleep(0)
            may.set()
            await releasing
            assert supervisor.joined
            assert not supervisor.control.held
            assert instance.calls[-3:] == [("pause", "keep", False), ("version", 0), "resume"]

    async def test_hold_released_between_restart_and_joining_ends(self) -> None:
        instance = pausable(Scripted(), paused=False)
        async with Stage(instance, settings=QUICK) as stage:
            supervisor = stage.driver.supervisors["i0"]
            await supervisor.control.hold("keep", False)
            instance.dead = True
            await until(lambda: not supervisor.joined)
            restart(instance)
            usual = instance.set_version

            async def fail(version: int) -> None:
                raise InstanceError("500")

            instance.calls.clear()
            instance.set_version = fail  # type: ignore[method-assign]
            instance.dead = False
            await until(lambda: supervisor.reason == "500")
            assert instance.calls[0] == ("pause", "keep", False)
            instance.describes(paused=True)
            await supervisor.control.release()
            instance.set_version = usual  # type: ignore[method-assign]
            await until(lambda: supervisor.joined)
            assert "resume" in instance.calls

    async def test_update_right_after_a_pause_is_no_stall(self) -> None:
        """Its pause was ordered before the resume of the first was done."""
        instance = pausable(Scripted(), paused=False)
        fleet = Fleet(instance, Settings(stall_s=5.0))
        supervisor = fleet.supervisor
        await supervisor.start()
        instance.calls.clear()
        supervisor.control.pause("keep", False)
        supervisor.control.resume()
        supervisor.control.pause("keep", False)
        instance.report = Gauges(1, 0, 0.5, generated_tokens=10)
        await asyncio.sleep(60.0)
        pause = ("pause", "keep", False)
        assert instance.calls == [pause, "resume", pause]
        assert fleet.losses == []
        supervisor.control.resume()
        await asyncio.sleep(60.0)
        assert "no progress" in fleet.losses[0]
        await supervisor.close()


class TestMembership:
    async def test_orders_during_a_loss_are_dropped(self) -> None:
        """The scheduler may order something as it hears of what broke there."""

        class Ordering(Fleet):
            loaded = 0

            def lose(self, name: str, reason: str) -> None:
                super().lose(name, reason)
                self.supervisor.control.update(1, self.load)

            async def load(self, client: Any, version: int) -> None:
                self.loaded = version

        instance = Scripted()
        fleet = Ordering(instance, Settings())
        await fleet.supervisor.start()
        instance.dead = True
        await asyncio.sleep(5.0)
        assert fleet.losses == ["i0: connection refused"]
        assert not fleet.loaded
        await fleet.supervisor.close()

    async def test_update_failing_on_cancellation_leaves_the_instance_unfit(self) -> None:
        """Whoever loaded may have been halfway."""

        async def load(client: Any, version: int) -> None:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                raise InstanceError("half of it is there") from None

        instance = Scripted()
        fleet = Fleet(instance, Settings())
        supervisor = fleet.supervisor
        await supervisor.start()
        supervisor.control.update(1, load)
        await asyncio.sleep(1.0)
        instance.dead = True
        await asyncio.sleep(5.0)
        instance.dead = False
        await asyncio.sleep(5.0)
        assert supervisor.membership.state is MembershipState.UNFIT
        assert "half of it is there" in supervisor.reason
        assert "restarted" in supervisor.reason
        restart(instance)
        await asyncio.sleep(5.0)
        assert supervisor.joined
        assert supervisor.reason == ""
        await supervisor.close()


class TestModels:
    async def test_models_of_absent_instances_do_not_count(self) -> None:
        """Two that were started with another model by mistake, and are now started with the right
        one, would wait for each other for ever."""
        first, second = Scripted("i0"), Scripted("i1")
        for instance in (first, second):
            instance.describes(model="wrong")
        async with Stage(first, second, settings=QUICK) as stage:
            supervisors = stage.driver.supervisors.values()
            first.dead = second.dead = True
            await until(lambda: not any(each.joined for each in supervisors))
            for instance in (first, second):
                restart(instance, model="right")
                instance.dead = False
            await until(lambda: all(each.joined for each in supervisors))

    async def test_two_instances_joining_together_agree_on_a_model(self) -> None:
        first, second = pausable(Scripted("i0"), model="a"), pausable(Scripted("i1"), model="b")
        async with Stage(settings=QUICK) as stage:
            await asyncio.gather(
                *(stage.driver.add_instance(each, patient=True) for each in (first, second))
            )
            joined = [each.joined for each in stage.driver.supervisors.values()]
            assert sorted(joined) == [False, True]

    async def test_last_instance_may_restart_with_another_model(self) -> None:
        instance = Scripted()
        instance.describes(model="old")
        async with Stage(instance, settings=QUICK) as stage:
            instance.dead = True
            await until(lambda: not stage.driver.supervisors["i0"].joined)
            restart(instance, model="new")
            instance.dead = False
            await until(lambda: stage.driver.supervisors["i0"].joined)


class TestWatching:
    async def test_tokens_of_wrong_weights_are_discarded(self) -> None:
        """It would count as of the weights that it should have."""

        async def load(client: Any, version: int) -> None:
            """The label is what tells."""

        instance = Scripted()
        offers = frozenset({"generate", "pause", "weight_info"})
        instance.describes(capabilities=offers)
        async with Stage(instance, settings=QUICK) as stage:
            stage.driver.publish(1, load)
            await until(lambda: stage.driver.view.run.fleet_version == 1)
            client = stage.ask(stream_every=2)
            await instance.order()
            await instance.stream(0, [5, 6])
            instance.weights = 0
            stage.driver.supervisors["i0"].suspect("pause")
            await until(lambda: stage.events(InstanceLost))
            instance.weights = 1
            again = await instance.order(1)
            assert list(again.token_ids) == PROMPT
            await instance.answer(1, [7])
            await until(lambda: client.sample)

    async def test_a_poll_from_before_a_failure_does_not_vouch_for_after_it(self) -> None:
        """It was restarted while its answer was on the way, and has other weights now."""

        class Slow(Scripted):
            answering: asyncio.Event | None = None
            polls = 0

            async def gauges(self) -> Gauges:
                report, answering = self.report, self.answering
                self.polls += 1
                if answering is not None:
                    await answering.wait()
                return report

        instance = Slow()
        instance.report = Gauges(0, 0, 0.0, started_at=1.0)
        async with Stage(instance, settings=Settings(poll_s=0.01)) as stage:
            client = stage.ask()
            await instance.order()
            before, after = asyncio.Event(), asyncio.Event()
            polls, instance.answering = instance.polls, before
            await until(lambda: instance.polls > polls)
            instance.report = Gauges(0, 0, 0.0, started_at=2.0)
            instance.answering = after
            await instance.fail(0, ConnectionBroken("connection reset"))
            await until(lambda: not stage.scheduler.state.fleet.attempts)
            before.set()
            await until(lambda: stage.scheduler.state.fleet.attempts)  # it has rested
            await asyncio.sleep(0.02)
            assert len(instance.orders) == 1
            restart(instance)
            after.set()
            await until(lambda: stage.events(InstanceLost))
            await instance.answer(1, [6])
            await until(lambda: client.sample)

    @pytest.mark.parametrize("error", [ValueError("10**30 tokens"), asyncio.CancelledError()])
    async def test_broken_client_stays_watched(self, error: BaseException) -> None:
        class Broken(Scripted):
            breaks = False

            async def gauges(self) -> Gauges:
                if self.breaks:
                    raise error
                return await super().gauges()

        instance = Broken()
        async with Stage(instance, settings=QUICK) as stage:
            supervisor = stage.driver.supervisors["i0"]
            instance.breaks = True
            await asyncio.sleep(0.1)
            assert isinstance(error, asyncio.CancelledError) or stage.events(InstanceLost)
            instance.breaks = False
            instance.dead = True
            await until(lambda: not supervisor.joined and "refused" in supervisor.reason)
            instance.dead = False
            await until(lambda: supervisor.joined)

    async def test_impossible_description_keeps_the_instance_away(self) -> None:
        class Odd(Scripted):
            odd = True

            async def describe(self) -> Any:
                if self.odd:
                    raise KeyError("slots")
                return await super().describe()

        instance = Odd()
        async with Stage(settings=QUICK) as stage:
            assert await stage.driver.add_instance(instance, patient=True) is None
            assert "slots" in stage.driver.supervisors["i0"].reason
            instance.odd = False
            await until(lambda: stage.driver.supervisors["i0"].joined)

    @pytest.mark.parametrize("call", ["resume", "set_version", "describe"])
    async def test_instance_hanging_while_joining_is_tried_again(self, call: str) -> None:
        instance = pausable(Scripted())
        settings = Settings(poll_s=0.01, control_timeout_s=0.05)
        async with Stage(settings=settings) as stage:
            usual = getattr(instance, call)

            async def hang(*_: Any) -> None:
                await asyncio.sleep(60)

            setattr(instance, call, hang)
            assert await stage.driver.add_instance(instance, patient=True) is None
            assert stage.driver.supervisors["i0"].reason == "no answer within 0.05 s"
            setattr(instance, call, usual)
            await until(lambda: stage.driver.supervisors["i0"].joined)

    async def test_hanging_resume_after_an_update_loses_the_instance_until_it_answers(self) -> None:
        instance = pausable(Scripted(), paused=False)
        settings = Settings(poll_s=0.01, control_timeout_s=0.05)
        partial = {"use": "partial", "kv": "retain", "at_update": "in_place"}
        async with Stage(instance, settings=settings, interruption=partial) as stage:
            stage.ask()
            await instance.order()
            usual = instance.resume

            async def hang() -> None:
                await asyncio.sleep(60)

            async def load(instance: Scripted, version: int) -> None:
                instance.describes(paused=True, version=version)

            instance.resume = hang  # type: ignore[method-assign]
            stage.driver.publish(1, load)
            await until(lambda: stage.events(InstanceLost))
            instance.resume = usual  # type: ignore[method-assign]
            await until(lambda: "resume" in instance.calls)
            await until(lambda: stage.driver.supervisors["i0"].joined)

    async def test_error_in_a_loss_handler_does_not_end_the_watch(self) -> None:
        instance = Scripted()
        async with Stage(instance, settings=QUICK) as stage:
            supervisor = stage.driver.supervisors["i0"]

            class Owner:
                def __getattr__(self, name: str) -> Any:
                    return getattr(stage.driver.fleet, name)

                def lose(self, name: str, reason: str) -> None:
                    stage.driver.fleet.lose(name, reason)
                    raise RuntimeError("the journal's disk is full")

            supervisor._owner = Owner()  # type: ignore[assignment]

            async def load(instance: Scripted, version: int) -> None:
                if instance.description.started_at == 1.0:
                    raise InstanceError("500")
                instance.calls.append("loaded")

            stage.driver.publish(1, load)
            await until(lambda: not supervisor.joined)
            restart(instance)
            await until(lambda: "loaded" in instance.calls)


def telling(instance: Scripted, version: int | None) -> Scripted:
    """It says which version it has, now and when it is asked again."""
    instance.weights = version
    return pausable(instance, version=version)


class TestVersionsAtJoin:
    async def test_newer_version_is_refused_until_published(self) -> None:
        async with Stage(settings=QUICK) as stage:
            instance = telling(Scripted(), 4)
            with pytest.raises(InstanceError, match="version 4, but the trainer is at 0"):
                await stage.driver.add_instance(instance)
            await stage.driver.add_instance(instance, patient=True)
            supervisor = stage.driver.supervisors["i0"]
            assert not supervisor.joined
            assert ("version", 0) not in instance.calls, "its label is not ours to change"
            stage.driver.publish(4, load)
            await until(lambda: supervisor.joined)
            assert stage.driver.view.instance("i0").version == 4  # type: ignore[union-attr]

    async def test_older_version_is_loaded_before_the_first_request(self) -> None:
        async with Stage(settings=QUICK) as stage:
            stage.driver.publish(5, load)
            instance = telling(Scripted(), 2)
            client = stage.ask()
            await stage.driver.add_instance(instance)
            await instance.answer(0, [6])
            await until(lambda: client.sample)
            assert instance.calls.index("loaded") >= 0
            assert instance.calls.index(("version", 5)) > instance.calls.index("loaded")

    async def test_externally_controlled_instance_does_not_join(self) -> None:
        async with Stage(settings=QUICK) as stage:
            versions = stage.driver.versions
            versions.close_gate("i0", "its weights are half loaded")
            await stage.driver.add_instance(Scripted(), patient=True)
            supervisor = stage.driver.supervisors["i0"]
            await asyncio.sleep(0.05)
            assert "half loaded" in supervisor.reason
            versions.open_gate("i0", "its weights are half loaded")
            await until(lambda: supervisor.joined)


async def load(client: Any, version: int) -> None:
    client.calls.append("loaded")


class TestSomebodyElse:
    async def test_external_pause_is_seen_and_followed(self) -> None:
        instance = pausable(telling(Scripted(), 0))
        instance.describes(capabilities=frozenset({"pause", "weight_info"}), paused=False)
        instance.report = Gauges(1, 0, 0.5, generated_tokens=10)
        settings = Settings(poll_s=0.01, stall_s=0.1)
        async with Stage(instance, settings=settings) as stage:
            client = stage.ask()
            await instance.order()
            instance.paused = True
            await until(lambda: stage.driver.versions.gate("i0"))
            await asyncio.sleep(0.3)
            assert not stage.events(InstanceLost), "it is paused, not stuck"
            instance.weights, instance.paused = 3, False
            await until(lambda: not stage.driver.versions.gate("i0"))
            assert stage.driver.view.run.version == 3
            await instance.answer(0, [6], spans=((0, 1),))
            await until(lambda: client.sample)

    async def test_instance_with_older_weights_than_loaded_is_lost(self) -> None:
        instance = telling(Scripted(), 4)
        instance.describes(capabilities=frozenset({"weight_info"}))
        async with Stage(settings=QUICK) as stage:
            stage.driver.publish(4, load)
            await stage.driver.add_instance(instance)
            instance.weights = 3
            await until(lambda: stage.events(InstanceLost))
            (lost,) = stage.events(InstanceLost)
            assert "version 3, but version 4 was loaded" in lost.reason


class TestContradictions:
    async def test_answer_of_newer_weights_waits_for_its_instance(self) -> None:
        instance = telling(Scripted(), 0)
        instance.describes(capabilities=frozenset({"weight_info"}))
        async with Stage(instance) as stage:
            client = stage.ask()
            await instance.order()
            instance.weights = 2
            await instance.answer(0, [5, 6, 7], spans=((0, 1), (2, 2)))
            await until(lambda: client.sample)
            sample = client.sample
            assert [(s.version, s.tokens) for s in sample.segments] == [(0, 1), (2, 2)]
            assert stage.driver.view.anomalies == {}

    async def test_unconfirmed_answer_is_retried(self) -> None:
        instance = telling(Scripted(), 0)
        instance.describes(capabilities=frozenset({"weight_info"}))
        async with Stage(instance, settings=QUICK) as stage:
            client = stage.ask()
            await instance.answer(0, [5, 6, 7], spans=((2, 3),))
            await instance.answer(1, [8], spans=((0, 1),))
            await until(lambda: client.sample)
            assert client.response_ids == [8]
            assert stage.driver.versions.contradictions == {"newer": 1}

    async def test_instance_lost_while_asked_is_reported_once(self) -> None:
        class Slow(Scripted):
            said = asyncio.Event()

            async def weight_version(self) -> int | None:
                await self.said.wait()
                return await super().weight_version()

        instance = telling(Slow(), 0)
        instance.describes(capabilities=frozenset({"weight_info"}))
        settings = Settings(poll_s=0.01, poll_timeout_s=0.1)
        async with Stage(instance, Scripted("i1"), settings=settings) as stage:
            client = stage.ask()
            await instance.answer(0, [5], spans=((2, 1),))
            await until(lambda: stage.driver.versions.contradictions)
            instance.dead = True
            await until(lambda: stage.events(InstanceLost))
            instance.said.set()
            other = stage.instances[1]
            await other.answer(0, [8])
            await until(lambda: client.sample)
            assert client.response_ids == [8]
            assert stage.driver.view.anomalies == {}
