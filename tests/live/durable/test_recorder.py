"""What is put down of a run, and what goes again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from itertools import count

import pytest

from rollout_sched import load_policy
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import BatchRequested, InstanceJoined, WeightsPublished
from rollout_sched.core.model.records import DeliveredSample, RunFacts
from rollout_sched.core.state.groups import Groups
from rollout_sched.live.driver import Driver
from rollout_sched.live.durable.recorder import RunRecorder
from rollout_sched.live.requests.token_payload import Piece, TokenPayload, TokenTranscript
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer import stored
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.records import ONE, StoredTranscripts, decoded, encoded_prompt
from rollout_sched.live.trainer.samples import LostGroup, Prompt, Reward
from rollout_sched.live.trainer.stored import OpenTransaction, StoredSession
from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import StoreBroken, StoreFull
from rollout_sched.store.store import Store
from tests import virtual_net
from tests.live.scripted import Scripted, until
from tests.store.rows import facts_in
from tests.store.simulated_disk import SimulatedDisk

PROMPT = Prompt("a", [1, 2], 1, 9)


class Keeping:
    """A keeper behind a driver, and what its store holds."""

    def __init__(self, folder, driver, **store):
        self.driver = driver
        self.broken = []
        store = Store(folder, **{"durable": "off", **store})
        scheduler = driver.pump.scheduler
        self.keeper = RunRecorder(
            store, scheduler, driver.front.payloads, StoredTranscripts(store), self.broken.append
        )
        driver.pump.observers.append(self.keeper.observe)

    async def rows(self):
        await self.keeper.session.promise()
        return {f"{f.kind} {f.name}".strip() for f in facts_in(self.keeper.store)} - {"store epoch"}


@asynccontextmanager
async def keeping(tmp_path, **store):
    driver = Driver(load_policy("round_robin_sync").scheduler(1))
    kept = Keeping(tmp_path / "s", driver, **store)
    try:
        yield kept
    finally:
        await driver.close()
        await kept.keeper.close()


async def test_a_group_leaves_nothing_behind_but_counters(tmp_path):
    async with keeping(tmp_path) as kept:
        driver, keeper, instance = kept.driver, kept.keeper, Scripted()
        await driver.add_instance(instance)
        driver.submit_group(PROMPT.submitted, lambda index: TokenPayload([1, 2], {}))
        keeper.session.submitted(PROMPT.uid, *encoded_prompt(PROMPT, tool=None))
        assert await kept.rows() == {"run", "group a", "prompt a"}
        driver.tell(BatchRequested())
        await instance.answer(0, [5, 6])
        while driver.view.run.batches == 0:
            await asyncio.sleep(0.001)
        assert await kept.rows() >= {"run", "prompt a", "delivered 0.0"}
        assert sorted(keeper.store.owners()) == ["p:a", "r:a/0"]
        keeper.session.acknowledged(0)
        assert not await kept.rows() & {"group a", "prompt a", "delivered 0.0"}
        assert keeper.store.owners() == []
        assert not kept.broken


async def test_unwritable_event_breaks_the_scheduler(tmp_path):
    async with keeping(tmp_path) as kept:
        with pytest.raises(TypeError):
            kept.keeper.observe(0.0, InstanceJoined("i0", 1, 100), [Deliver(0, 0, None)])
        assert kept.broken


async def test_the_model_is_written_when_it_changes(tmp_path):
    async with keeping(tmp_path) as kept:
        fleet = kept.driver.fleet
        fleet.record = kept.keeper
        for number, model in enumerate(["", "m", "", "m"]):
            instance = Scripted(f"i{number}")
            instance.describes(model=model)
            await kept.driver.add_instance(instance)
        await kept.keeper.session.promise()
        (row,) = [f for f in facts_in(kept.keeper.store) if f.kind == facts.MODEL]
        assert row.value == b"m"


async def test_direct_requests_are_not_stored(tmp_path):
    async with keeping(tmp_path) as kept:
        driver, instance = kept.driver, Scripted()
        await driver.add_instance(instance)
        driver.submit(TokenPayload([1, 2], {}), 2, 9)
        await instance.answer(0, [5])
        assert await kept.rows() <= {"run", "recent"}
        assert kept.keeper.store.owners() == []


async def test_unreported_version_survives_a_power_failure(tmp_path):
    """A trainer that brings weights around us need not publish them: what was seen is all there is,
    and who does not know of it takes them for another run's."""
    disk = SimulatedDisk(tmp_path / "s")
    copies = count()

    def left():
        after = disk.left_by_a_crash(tmp_path / f"after {next(copies)}", "all")
        store = Store(after)
        try:
            run = store.facts(facts.RUN).get(ONE)
            return None if run is None else decoded(run, RunFacts).version
        finally:
            store.close()

    async with keeping(tmp_path, durable="batch", disk=disk) as kept:
        kept.driver.tell(WeightsPublished(1, loads=False))
        await until(lambda: left() == 1)


class HangingDisk(Disk):
    def __init__(self):
        self.answers = threading.Event()
        self.answers.set()

    def commit(self, database):
        assert self.answers.wait(60)
        super().commit(database)


def test_a_disk_that_hangs_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stored, "LOOK_S", 0.02)
    disk = HangingDisk()

    async def scene():
        async with keeping(tmp_path, disk=disk) as kept:
            writer = kept.keeper.writer
            disk.answers.clear()
            kept.keeper.session.submitted(PROMPT.uid, *encoded_prompt(PROMPT, tool=None))
            promise = kept.keeper.session.promise()
            try:
                await until(lambda: caplog.text.count("its disk has not answered for") > 2, 30)
                assert writer.hangs_s > 0.02
            finally:
                disk.answers.set()
            await promise
            await until(lambda: writer.hangs_s == 0.0)

    asyncio.run(scene())


class BrokenDisk(Disk):
    broken = False

    def commit(self, database):
        if self.broken:
            raise OSError("no disk")
        super().commit(database)


class Opened:
    """A transaction, how often it was completed, and why it could not be written."""

    def __init__(self, folder, durable, disk):
        self.store = Store(folder, durable=durable, disk=disk)
        self.completed = 0
        self.errors = []
        self.open = OpenTransaction(self.store, self.complete, self.errors.append)

    def complete(self, changes):
        self.completed += 1
        changes.put("run", "completed", b"%d" % self.completed)

    def rows(self):
        return {fact.name: fact.value for fact in facts_in(self.store)}


@asynccontextmanager
async def opened(folder, durable="batch", disk=None):
    transaction = Opened(folder, durable, disk)
    yield transaction
    await transaction.open.close()


@pytest.mark.parametrize("durable", ["batch", "event", "off"])
async def test_changes_of_one_turn_are_written_once(tmp_path, durable):
    async with opened(tmp_path, durable) as it:
        for number in range(10):
            it.open.changes.put("run", str(number), b"1")
            it.open.soon()
        while not it.completed:
            await asyncio.sleep(0.001)
        await it.open.promise()
        assert it.completed == 2
        assert it.rows() | {"completed": b"2"} == it.rows()
        assert set(map(str, range(10))) <= it.rows().keys()


async def test_a_promise_covers_all_earlier_changes(tmp_path):
    async with opened(tmp_path) as it:
        it.open.changes.put("run", "a", b"1")
        await it.open.promise()
        assert it.rows()["a"] == b"1"


async def test_close_writes_pending_changes(tmp_path):
    async with opened(tmp_path) as it:
        it.open.changes.put("run", "a", b"1")
    store = Store(tmp_path)
    assert store.facts("run").keys() == {"a", "completed"}
    store.close()


async def test_disk_failure_is_reported_in_the_loop(tmp_path):
    disk = BrokenDisk()
    async with opened(tmp_path, disk=disk) as it:
        disk.broken = True
        with pytest.raises(StoreBroken):
            await it.open.promise()
        while not it.errors:
            await asyncio.sleep(0.001)
        (error,) = it.errors
        assert isinstance(error, StoreBroken)
        disk.broken = False


class Kept:
    """A session of which the scheduler has no groups, and what its store holds."""

    def __init__(self, folder):
        self.store = Store(folder, durable="off")
        self.open = OpenTransaction(self.store, lambda changes: None, print)
        self.transcripts = StoredTranscripts(self.store)
        self.session = StoredSession(self.open, Groups(), self.transcripts)

    def sample(self, group):
        """One of two tokens, in the store."""
        transcript = TokenTranscript()
        transcript.append(1, 2, Piece([5, 6], None))
        self.transcripts.write(f"{group}/0", transcript, self.open.changes)
        return DeliveredSample(f"{group}/0", group, 0, 2, 0, (), 0, "stop")

    async def rows(self):
        await self.session.promise()
        rows = {f"{fact.kind} {fact.name}".strip() for fact in facts_in(self.store)}
        return rows - {"store epoch"}


def scene(tmp_path):
    """Decorates what happens with a session: it runs at once."""

    def run(happens):
        async def inside():
            kept = Kept(tmp_path / "s")
            try:
                await happens(kept)
            finally:
                await kept.open.close()

        virtual_net.run(inside())

    return run


def test_a_batch_and_its_samples_stay_until_acknowledged(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        session = kept.session
        for uid, part in (("a", 0), ("b", 1)):
            session.submitted(uid, *encoded_prompt(Prompt(uid, [1, 2], 1, 9), tool=None))
            session.rewarded(f"{uid}/0", Reward(1.0))
            session.delivered(Deliver(7, 0, (kept.sample(uid),), part=part, last=bool(part)))
            session.forget_groups((uid,))
        session.acknowledged(6)
        assert await kept.rows() == {
            *("prompt a", "prompt b", "reward a/0", "reward b/0", "delivered 7.0", "delivered 7.1")
        }
        assert sorted(kept.store.owners()) == ["p:a", "p:b", "r:a/0", "r:b/0"]
        session.acknowledged(7)
        assert await kept.rows() == set()
        assert kept.store.owners() == []


def test_lost_group_deletes_its_prompt(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.submitted("a", *encoded_prompt(Prompt("a", [1, 2], 1, 9), tool=None))
        kept.session.forget_groups(("a",))
        assert await kept.rows() == set()
        assert kept.store.owners() == []


def test_a_failure_stays_until_its_batch_is_acknowledged(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.lost(LostGroup("f", "why"))
        assert await kept.rows() == {"failed :f"}
        kept.session.lost(LostGroup("f", "why"), 3)
        kept.session.acknowledged(4)
        assert await kept.rows() == {"failed 3:f"}
        kept.session.acknowledged(3)
        assert await kept.rows() == set()


def test_number_of_a_batch_without_samples_is_kept(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.record_report(Deliver(3, 0, ()))
        assert await kept.rows() == {"delivered 3.0", "last_report"}
        kept.session.acknowledged(3)
        assert await kept.rows() == {"last_report"}


def test_each_failure_of_a_group_stays_until_acknowledged(tmp_path):
    """Its trainer submits it again while a batch still tells of an earlier one."""

    @scene(tmp_path)
    async def _(kept):
        kept.session.lost(LostGroup("f", "why"), 3)
        kept.session.lost(LostGroup("f", "why again"))
        assert await kept.rows() == {"failed 3:f", "failed :f"}
        kept.session.lost(LostGroup("f", "why again"), 4)
        assert await kept.rows() == {"failed 3:f", "failed 4:f"}
        kept.session.acknowledged(4)
        assert await kept.rows() == {"failed 3:f"}
        kept.session.acknowledged(3)
        assert await kept.rows() == set()


def test_a_lease_stays_while_a_trainer_must_hear_of_it(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.leased(3, LeaseFacts("b", ("a",)))
        assert "lease 3" in await kept.rows()
        kept.session.leased(3, None)
        assert "lease 3" not in await kept.rows()


def test_full_store_refuses_new_work(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.check_room()
        kept.open.writer.full = "the disk is full"
        with pytest.raises(StoreFull):
            kept.session.check_room()
