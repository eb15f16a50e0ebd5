"""Streams that run go before calls that begin or end."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.gateway.data_plane.reply import MOST_WAITING, Pacer
from tests.integrations.gateway.house import run
from tests.integrations.gateway.scripted import Call, Instance, chunk
from tests.integrations.gateway.test_data_plane import BODY, Stage

STREAM = {**BODY, "stream": True}


def never(error: Exception) -> None:
    raise AssertionError("nothing has failed") from error


def taken_by_turn(count: int, streams: int, turns: int) -> list[int]:
    """How many of `count` pieces of work were done after each turn of the loop."""
    done: list[int] = []

    async def scene() -> list[int]:
        queue = Pacer()
        queue.streams = streams
        for piece in range(count):
            queue.take(done.append, piece, never)
        seen = [len(done)]
        for _ in range(turns):
            await asyncio.sleep(0)
            seen.append(len(done))
        return seen

    seen = asyncio.run(scene())
    assert done == sorted(done)
    return seen


class TestTurns:
    def test_without_streams_nobody_waits(self) -> None:
        assert taken_by_turn(5, streams=0, turns=1) == [5, 5]

    def test_beside_streams_one_at_a_time_and_in_order(self) -> None:
        assert taken_by_turn(4, streams=1, turns=4) == [1, 2, 3, 4, 4]

    def test_with_more_than_may_wait_the_oldest_is_done_out_of_turn(self) -> None:
        assert taken_by_turn(MOST_WAITING + 3, streams=1, turns=1) == [3, 4]

    def test_who_comes_later_stays_behind_who_waits(self) -> None:
        async def scene() -> None:
            queue, done = Pacer(), list[str]()
            queue.streams = 1
            for name in "abc":
                queue.take(done.append, name, never)
            queue.streams = 0
            await asyncio.sleep(0)
            queue.take(done.append, "d", never)
            assert done == ["a", "b"]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert done == ["a", "b", "c", "d"]

        run(scene())

    @pytest.mark.parametrize("streams", [0, 1])
    @pytest.mark.parametrize("after", [0, MOST_WAITING + 2])
    def test_a_failure_is_the_pieces_own(self, streams: int, after: int) -> None:
        """At once, in a later turn, and out of turn, where it hit who came then."""

        def fail(_: object) -> None:
            raise ValueError("of its own")

        def fail_too(error: Exception) -> None:
            failures.append(error)
            raise ValueError("and nobody can be told")

        failures: list[Exception] = []

        async def scene() -> None:
            queue, done = Pacer(), list[int]()
            queue.streams = streams
            queue.take(done.append, 0, never)
            queue.take(fail, None, failures.append)
            queue.take(fail, None, fail_too)
            for piece in range(1, after):
                queue.take(done.append, piece, never)
            while len(done) < max(1, after) or len(failures) < 2:
                await asyncio.sleep(0)
            assert done == list(range(max(1, after)))
            assert [str(error) for error in failures] == ["of its own"] * 2

        run(scene())


class TestCallsBesideStreams:
    def test_events_pass_between_two_calls_that_came_together(self) -> None:
        async def scene() -> None:
            instance = Instance(slots=9)
            async with Stage(instance) as stage:
                stream = await self.open(stage, instance)
                for _ in range(3):
                    stage.call()
                before = len(instance.pool.asked)
                await instance.event(0, chunk([8]))
                assert b'"token_ids":[8]' in stream.data
                assert len(instance.pool.asked) == before == 2
                await instance.asked(3)

        run(scene())

    def test_a_client_that_goes_before_its_turn_has_asked_for_nothing(self) -> None:
        async def scene() -> None:
            instance = Instance(slots=9)
            async with Stage(instance) as stage:
                await self.open(stage, instance)
                stage.call()
                going = stage.call()
                going.gone = True
                stage.call()
                await instance.asked(2)
                for _ in range(3):
                    await asyncio.sleep(0)
                assert len(instance.pool.asked) == 3
                assert stage.data_plane.calls.requests == 3

        run(scene())

    def test_of_streams_that_end_together_the_second_waits_for_its_turn(self) -> None:
        async def scene() -> None:
            instance = Instance(slots=9)
            async with Stage(instance) as stage:
                streams = [await self.open(stage, instance) for _ in range(3)]
                await asyncio.sleep(0)  # the last one's beginning was this turn's work
                for number in (0, 1):
                    await instance.event(number, chunk([8], "stop"), end=True)
                assert [stream.over.is_set() for stream in streams] == [True, False, False]
                await instance.event(2, chunk([8]))
                assert b'"token_ids":[8]' in streams[2].data
                assert (await streams[1].events())[-1] == b"[DONE]"

        run(scene())

    def test_streams_are_counted_while_they_are_open(self) -> None:
        async def scene() -> None:
            instance = Instance(slots=9)
            async with Stage(instance) as stage:
                ended = await self.open(stage, instance)
                left = await self.open(stage, instance)
                assert stage.data_plane.calls.pacer.streams == 2
                await instance.event(0, chunk([8], "stop"), end=True)
                await ended.events()
                assert stage.data_plane.calls.pacer.streams == 1
                assert left.on_disconnect is not None
                left.on_disconnect()
                assert stage.data_plane.calls.pacer.streams == 0

        run(scene())

    @staticmethod
    async def open(stage: Stage, instance: Instance) -> Call:
        """A stream that has brought its first token."""
        number = len(instance.pool.asked)
        stream = stage.call(STREAM)
        await instance.event(number, chunk([7]))
        assert stream.status == 200
        return stream
