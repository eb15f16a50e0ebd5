"""Laws of batches for several trainers that die, return late and lose their leases, while the
scheduler restarts.

Every batch is acknowledged once; no two trainers have it within one lease; and a trainer is always
told if another trainer has taken the batch that it trained.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from rollout_sched.live.trainer.delivery import (
    BatchDelivery,
    LeaseEnded,
    LeaseFacts,
    Leases,
    NotReady,
)
from rollout_sched.live.trainer.samples import Batch

TERM_S = 10.0
NAMES = ("a", "b")
SIZES = (1, 3, 1, 2, 1, 1, 2, 1, 1, 1)  # of each batch, in parts


class Trainer:
    """`received`: what has arrived, which it reports when it asks; `trains`: the batch that it will
    report as trained, once the whole batch has arrived."""

    def __init__(self) -> None:
        self.received: tuple[int | None, int | None] = (None, None)
        self.trains: int | None = None
        self.checkpoint: int | None = None


class TrainersAndLeases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.trainers = {name: Trainer() for name in NAMES}
        self.coming = [
            Batch(n, 0, [], [], part, part == size - 1)
            for n, size in enumerate(SIZES)
            for part in range(size)
        ]
        self.stored: dict[int, list[Batch]] = {}  # handed out and not acknowledged
        self.kept: dict[int, LeaseFacts] = {}
        self.acknowledged: list[int] = []
        self.has: dict[int, tuple[str, float]] = {}  # its holder, and until when
        self.asked: bool | None = None
        self.delivery = self.begin()

    def begin(self) -> BatchDelivery:
        async def make() -> BatchDelivery:
            leases = Leases(TERM_S, self.changed)
            return BatchDelivery(self.request, leases, self.arrived, lambda: self.now)

        return self.loop.run_until_complete(make())

    def request(self, parts: bool) -> None:
        self.asked = parts

    def changed(self, batch: int, facts: LeaseFacts | None) -> None:
        self.kept.pop(batch, None)
        if facts is not None:
            self.kept[batch] = facts

    def arrived(self, batch: int) -> None:
        assert batch not in self.acknowledged
        self.acknowledged.append(batch)
        del self.stored[batch]

    def heard_of(self, name: str) -> None:
        for batch, (holder, _) in self.has.items():
            if holder == name:
                self.has[batch] = (name, self.now + TERM_S)

    @rule(
        name=st.sampled_from(NAMES),
        seconds=st.sampled_from([0.0, 0.0, 3.0, 6.0]),
        beats=st.sampled_from([None, *NAMES]),
        parts_made=st.integers(0, 3),
        parts=st.booleans(),
        lost=st.sampled_from([False, False, True]),
    )
    def time_passes_and_one_asks(
        self,
        name: str,
        seconds: float,
        beats: str | None,
        parts_made: int,
        parts: bool,
        lost: bool,
    ) -> None:
        """`beats`: the trainer that renews its lease with a heartbeat meanwhile."""
        self.now += seconds
        if beats is not None:
            self.heard_of(beats)
            self.delivery.renew(beats)
        self.now += seconds
        for _ in range(parts_made):
            self.make()
        self.ask(name, parts=parts, lost=lost)

    def ask(self, name: str, *, parts: bool, lost: bool) -> None:
        """`lost`: the answer is lost on its way."""
        trainer = self.trainers[name]
        number, part = trainer.received
        trained = trainer.trains
        mine = number is None or self.has[number][0] == name
        before = list(self.acknowledged)
        self.heard_of(name)
        try:
            batch = self.loop.run_until_complete(
                self.delivery.next(number, 0, trainer=name, part=part, parts=parts)
            )
        except NotReady:
            batch = None
        except LeaseEnded:
            assert not mine, "the holder of the batch is refused"
            assert number not in before or number in self.acknowledged
            self.trainers[name] = Trainer()
            return
        assert mine, "another trainer has the batch, and the trainer was not told"
        if trained is not None:
            assert trained in self.acknowledged
            if not lost:
                trainer.trains, trainer.checkpoint = None, trained
        if batch is not None:
            self.handed(name, batch, lost=lost)

    def handed(self, name: str, batch: Batch, *, lost: bool) -> None:
        holder, until = self.has.get(batch.number, (name, 0.0))
        assert batch.number not in self.acknowledged
        assert holder == name or until <= self.now, "another trainer has it"
        self.has[batch.number] = (name, self.now + TERM_S)
        if not lost:
            trainer = self.trainers[name]
            trainer.received = (batch.number, batch.part)
            trainer.trains = batch.number if batch.last else None

    @rule(name=st.sampled_from(NAMES))
    def dies_and_comes_back(self, name: str) -> None:
        """It returns with the batch that it had acknowledged, from its checkpoint."""
        checkpoint = self.trainers[name].checkpoint
        self.trainers[name] = Trainer()
        self.trainers[name].checkpoint = checkpoint
        self.trainers[name].received = (checkpoint, None)

    @rule(name=st.sampled_from(NAMES))
    def dies_with_a_checkpoint_that_nobody_heard_of(self, name: str) -> None:
        trains = self.trainers[name].trains
        if trains is not None:
            self.trainers[name].received = (trains, None)

    def make(self) -> None:
        if self.coming and self.delivery.awaited:
            part = self.coming.pop(0)
            self.stored.setdefault(part.number, []).append(part)
            if part.last:
                self.asked = None
            self.delivery.deliver(part)

    @rule()
    def restart(self) -> None:
        self.delivery = self.begin()
        parts = [part for parts in self.stored.values() for part in parts]
        self.delivery.restore(parts, self.asked, dict(self.kept))
        for batch, (name, _) in self.has.items():
            self.has[batch] = (name, self.now + TERM_S)

    def teardown(self) -> None:
        """Without further faults every batch is completed, and every trainer is told of the end."""
        over: dict[str, Any] = {}
        for _ in range(10 * len(SIZES)):
            self.make()
            self.now += TERM_S + 1
            for name in NAMES:
                if not self.coming and not self.delivery.begun and self.delivery.awaited:
                    self.delivery.deliver(None)
                self.ask(name, parts=False, lost=False)
        assert sorted(self.acknowledged) == list(range(len(SIZES)))
        for name in NAMES:
            over[name] = self.loop.run_until_complete(self.delivery.next(None, 0, trainer=name))
        assert over == dict.fromkeys(NAMES)
        self.loop.close()


TrainersAndLeases.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None
)
TestTrainersAndLeases = TrainersAndLeases.TestCase
