"""Attempts stopped from here: each comes to its end, and one that is gone already is no error."""

from __future__ import annotations

import asyncio

from rollout_sched.core.model.actions import Interrupt
from rollout_sched.core.model.events import Event, RequestFailed, RequestInterrupted
from rollout_sched.live.ports import Outcome
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.attempts import AttemptTable
from rollout_sched.live.requests.token_payload import Piece
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted, until
from tests.live.test_running_attempts import Book


class Stage:
    def __init__(self) -> None:
        self.book = Book()
        settings = Settings(abort_timeout_s=0.05, stream_s=0.01)
        self.table = AttemptTable(self.book.running, settings)

    def begin(self, *, obeys: bool = True, streamed: int = 0) -> LiveAttempt:
        running = self.book.begin(1, streamed=streamed)
        if obeys:
            client = running.client
            assert isinstance(client, Scripted)
            aborted = Outcome(2, "abort", (), Piece([5, 5], None))
            client.obey = lambda call: self.book.running.ended(running, aborted)
        return running

    @property
    def told(self) -> list[Event]:
        told: list[Event] = self.book.link.told
        return told


def test_what_is_interrupted_is_told_when_it_has_answered() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.begin()
        stage.table.interrupt(Interrupt("r1", 1, "i0"))
        await until(lambda: stage.told)
        assert isinstance(stage.told[0], RequestInterrupted)
        stage.table.interrupt(Interrupt("r1", 1, "i0"))
        stage.table.stop(1, "again")
        stage.table.disbelieve(1)
        await stage.table.close()
        assert len(stage.told) == 1

    asyncio.run(scene())


def test_what_does_not_stop_is_given_up_with_the_reason() -> None:
    async def scene() -> None:
        stage = Stage()
        running = stage.begin(obeys=False)
        stage.table.stop(1, "it stands still")
        assert running.stopped
        await until(lambda: stage.told)
        (told,) = stage.told
        assert isinstance(told, RequestFailed)
        assert "it stands still" in told.reason
        await stage.table.close()

    asyncio.run(scene())


def test_only_what_has_brought_something_can_be_disbelieved() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.begin(obeys=False)
        stage.table.disbelieve(1)
        assert len(stage.table) == 1
        await stage.table.close()
        stage = Stage()
        stage.begin(obeys=False, streamed=2)
        stage.table.disbelieve(1)
        assert not len(stage.table)
        (told,) = stage.told
        assert isinstance(told, RequestFailed)
        assert not told.usable
        await stage.table.close()

    asyncio.run(scene())


def test_a_loss_is_told_between_what_streams_brought_and_what_was_sent_meanwhile() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.begin(obeys=False, streamed=2)
        heard: list[int] = []

        def lost() -> None:
            heard.append(len(stage.told))
            stage.book.begin(2)

        stage.table.lose("i0", lost)
        assert heard == [1]
        assert not len(stage.table)
        await stage.table.close()

    asyncio.run(scene())
