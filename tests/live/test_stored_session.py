"""What trainers have said and were told, as a store holds it."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.core.state.groups import Groups
from rollout_sched.live.durable.recorder import OpenTransaction, StoredSession
from rollout_sched.live.durable.records import StoredTranscripts
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.samples import LostGroup, Prompt, Reward
from rollout_sched.store.errors import StoreFull
from rollout_sched.store.store import Store


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
        transcript.keep(1, 2, Piece([5, 6], None))
        self.transcripts.write(f"{group}/0", transcript, self.open.changes)
        return DeliveredSample(f"{group}/0", group, 0, 2, 0, (), 0, "stop")

    async def rows(self):
        await self.session.promise()
        rows = {f"{fact.kind} {fact.name}".strip() for fact in self.store._database.facts()[0]}
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

        asyncio.run(inside())

    return run


def test_a_batch_and_what_it_is_made_of_stay_until_it_is_acknowledged(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        session = kept.session
        for uid, part in (("a", 0), ("b", 1)):
            session.submitted(Prompt(uid, [1, 2], 1, 9), None)
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


def test_a_group_that_is_lost_takes_its_prompt_with_it(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.submitted(Prompt("a", [1, 2], 1, 9), None)
        kept.session.forget_groups(("a",))
        assert await kept.rows() == set()
        assert kept.store.owners() == []


def test_a_failure_stays_until_the_batch_that_told_of_it_has_arrived(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.lost(LostGroup("f", "why"))
        assert await kept.rows() == {"failed :f"}
        kept.session.lost(LostGroup("f", "why"), 3)
        kept.session.acknowledged(4)
        assert await kept.rows() == {"failed 3:f"}
        kept.session.acknowledged(3)
        assert await kept.rows() == set()


def test_the_number_of_a_batch_that_only_tells_is_kept(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.telling(Deliver(3, 0, ()))
        assert await kept.rows() == {"delivered 3.0", "telling"}
        kept.session.acknowledged(3)
        assert await kept.rows() == {"telling"}


def test_each_failure_of_a_group_stays_until_it_has_arrived(tmp_path):
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


def test_a_lease_stays_while_somebody_is_to_be_told_of_it(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.leased(3, LeaseFacts("b", ("a",)))
        assert "lease 3" in await kept.rows()
        kept.session.leased(3, None)
        assert "lease 3" not in await kept.rows()


def test_no_new_work_is_taken_by_a_store_that_is_full(tmp_path):
    @scene(tmp_path)
    async def _(kept):
        kept.session.check_room()
        kept.open.writer.full = "the disk is full"
        with pytest.raises(StoreFull):
            kept.session.check_room()
