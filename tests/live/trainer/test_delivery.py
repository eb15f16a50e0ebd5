"""Batches over a connection that may break: none is lost, and none comes twice after its ack."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.live.trainer.delivery import BatchDelivery, LeaseEnded, Leases, NotReady
from rollout_sched.live.trainer.samples import Batch, FailedGroup
from tests import virtual_net


class Maker:
    """Delivers what a test puts there, when it is asked for."""

    def __init__(self, term_s: float = 0.0) -> None:
        self.now = 0.0
        self.acknowledged: list[int] = []
        self.delivery = BatchDelivery(
            self.request, Leases(term_s), self.acknowledged.append, lambda: self.now
        )
        self.batches: list[Batch | None] = []
        self.asked = 0
        self.in_parts: list[bool] = []

    def request(self, parts: bool) -> None:
        self.asked += 1
        self.in_parts.append(parts)
        self.hand_over()

    def put_part(self, number: int, part: int, *, last: bool = False) -> None:
        """What is in it is named after it, so that what is joined can be told."""
        name = FailedGroup(f"{number}.{part}", "")
        self.delivery.deliver(Batch(number, 0, [], [name], part, last))

    def put(self, number: int | None) -> None:
        self.batches.append(None if number is None else Batch(number, 0, []))
        self.hand_over()

    def hand_over(self) -> None:
        if self.batches and self.delivery.awaited:
            self.delivery.deliver(self.batches.pop(0))


def made() -> tuple[Maker, BatchDelivery]:
    maker = Maker()
    return maker, maker.delivery


async def number(
    delivery: BatchDelivery, ack: int | None, timeout_s: float = 1.0, trainer: str = "a"
) -> int | None:
    """Of the next batch; None for "not yet"."""
    try:
        batch = await delivery.next(ack, timeout_s, trainer=trainer)
    except NotReady:
        return None
    return batch.number


@pytest.mark.parametrize("wrong", [None, -1, 1, 99, 2**70])
async def test_a_wrong_acknowledgement_brings_the_same_batch_again(wrong: int | None) -> None:
    maker, delivery = made()
    maker.put(0)
    maker.put(1)
    assert await number(delivery, None) == 0
    assert await number(delivery, wrong) == 0
    assert await number(delivery, 0) == 1
    assert await number(delivery, 0) == 1  # the acknowledgement of the first, once more


async def test_concurrent_calls_of_a_trainer_get_one_batch() -> None:
    maker, delivery = made()
    asking = [asyncio.create_task(number(delivery, None)) for _ in range(2)]
    await asyncio.sleep(0)
    maker.put(0)
    assert await asyncio.gather(*asking) == [0, 0]
    # Both acknowledge it: the second is no acknowledgement of the batch after.
    asking = [asyncio.create_task(number(delivery, 0)) for _ in range(2)]
    await asyncio.sleep(0)
    maker.put(1)
    maker.put(2)
    assert await asyncio.gather(*asking) == [1, 1]
    assert await number(delivery, 0) == 1
    assert await number(delivery, 1) == 2
    assert maker.asked == 3


@pytest.mark.parametrize("turns", range(8))
async def test_a_timeout_at_the_moment_of_delivery(turns: int) -> None:
    """Whichever is first: the batch comes now, or with the next question."""
    maker, delivery = made()
    asking = asyncio.create_task(number(delivery, None, timeout_s=0))
    for _ in range(turns):
        await asyncio.sleep(0)
    maker.put(0)
    assert await asking in (None, 0)
    assert await number(delivery, None) == 0
    assert maker.asked == 1


@pytest.mark.parametrize("turns", range(8))
async def test_call_cancelled_at_delivery_loses_no_batch(turns: int) -> None:
    maker, delivery = made()
    asking = asyncio.create_task(number(delivery, None))
    await asyncio.sleep(0)
    maker.put(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await number(delivery, None) == 0
    assert maker.asked == 1


async def test_end_is_reported_on_every_call() -> None:
    maker, delivery = made()
    maker.put(None)
    for ack in (None, 0, 7):
        assert await delivery.next(ack, 1.0) is None


async def test_nothing_is_ready_after_the_gateway_ends() -> None:
    _, delivery = made()
    asking = asyncio.create_task(number(delivery, None))
    await asyncio.sleep(0)
    delivery.close()
    assert await asking is None
    for ack in (None, 0):
        assert await number(delivery, ack, timeout_s=0) is None


async def test_failure_is_reported_on_every_call() -> None:
    maker, delivery = made()
    asking = asyncio.create_task(delivery.next(None, None))
    await asyncio.sleep(0)
    delivery.fail(RuntimeError("no more"))
    with pytest.raises(RuntimeError, match="no more"):
        await asking
    for ack in (None, 0):
        with pytest.raises(RuntimeError, match="no more"):
            await delivery.next(ack, None)
    assert maker.asked == 1


async def test_failed_batch_request_is_repeated() -> None:
    may = False

    def request(parts: bool) -> None:
        if not may:
            raise RuntimeError("not now")

    delivery = BatchDelivery(request, Leases(0.0), [].append, lambda: 0.0)
    with pytest.raises(RuntimeError, match="not now"):
        await delivery.next(None, None)
    may = True
    asking = asyncio.create_task(delivery.next(None, None))
    await asyncio.sleep(0)
    delivery.deliver(None)
    assert await asking is None


async def names(
    delivery: BatchDelivery, ack: int | None = None, part: int | None = None, *, parts: bool = True
) -> list[str] | None:
    """Of what comes next, within a moment; None for "not yet"."""
    try:
        batch = await delivery.next(ack, 0.01, part=part, parts=parts)
    except NotReady:
        return None
    return [failed.uid for failed in batch.failed]


class TestSeveralTrainers:
    async def test_each_trainer_gets_its_own_batches(self) -> None:
        maker, delivery = made()
        asking = [asyncio.create_task(number(delivery, None, trainer=name)) for name in "ab"]
        await asyncio.sleep(0)
        assert maker.asked == 1, "one batch is made at a time"
        maker.put(0)
        maker.put(1)
        assert await asyncio.gather(*asking) == [0, 1]
        assert await number(delivery, None, trainer="b") == 1
        maker.put(2)
        assert await number(delivery, 1, trainer="b") == 2
        assert await number(delivery, None, trainer="a") == 0
        assert maker.acknowledged == [1]

    async def test_batch_of_a_dead_trainer_goes_to_a_waiting_one(self) -> None:
        maker = Maker(term_s=0.01)
        delivery = maker.delivery
        maker.put(0)
        assert await number(delivery, None, trainer="a") == 0
        asking = asyncio.create_task(number(delivery, None, trainer="b"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asking.done()
        maker.now = 0.01
        assert await asking == 0
        with pytest.raises(LeaseEnded, match="trainer 'b' has it now"):
            await delivery.next(0, 0, trainer="a")
        assert maker.acknowledged == []

    async def test_trainer_waiting_for_parts_keeps_its_batch(self) -> None:
        maker = Maker(term_s=0.02)
        delivery = maker.delivery
        loop = asyncio.get_running_loop()
        delivery._clock = loop.time
        waiting = asyncio.create_task(delivery.next(None, 30, trainer="a", parts=True))
        await asyncio.sleep(0)
        maker.put_part(0, 0)
        assert await waiting is not None
        waiting = asyncio.create_task(delivery.next(0, 30, trainer="a", part=0, parts=True))
        asking = asyncio.create_task(delivery.next(None, 0.1, trainer="b", parts=True))
        with pytest.raises(NotReady):
            await asking
        maker.put_part(0, 1, last=True)
        rest = await waiting
        assert [failed.uid for failed in rest.failed] == ["0.1"]

    async def test_the_end_comes_when_nothing_can_come_back(self) -> None:
        maker = Maker(term_s=5.0)
        delivery = maker.delivery
        maker.put(0)
        assert await number(delivery, None, trainer="a") == 0
        maker.put(None)
        assert await number(delivery, None, timeout_s=0, trainer="b") is None  # not yet
        maker.now = 5.0
        assert await number(delivery, None, trainer="b") == 0
        assert await delivery.next(0, 1.0, trainer="b") is None
        assert await delivery.next(None, 1.0, trainer="a") is None

    async def test_endless_leases_of_others_are_not_waited_for(self) -> None:
        maker, delivery = made()
        maker.put(0)
        assert await number(delivery, None, trainer="a") == 0
        maker.put(None)
        assert await delivery.next(None, 1.0, trainer="b") is None

    async def test_lease_owners_are_listed(self) -> None:
        maker = Maker(term_s=5.0)
        maker.put(0)
        await number(maker.delivery, None, trainer="a")
        assert maker.delivery.renew("a") == 0
        assert maker.delivery.summary() == [
            {"batch": 0, "state": "leased", "trainer": "a", "ends_in_s": 5.0}
        ]


class TestParts:
    async def test_parts_come_in_order(self) -> None:
        maker, delivery = made()
        assert await names(delivery) is None
        maker.put_part(0, 0)
        assert await names(delivery) == ["0.0"]
        assert await names(delivery, 0, 0) is None
        maker.put_part(0, 1, last=True)
        assert await names(delivery, 0, 0) == ["0.1"]
        assert maker.asked == 1
        assert await names(delivery, 0, 1) is None
        assert maker.asked == 2

    async def test_part_is_repeated_until_the_next_is_asked_for(self) -> None:
        maker, delivery = made()
        await names(delivery)
        maker.put_part(0, 0)
        maker.put_part(0, 1)
        for _ in range(2):
            assert await names(delivery, 0, 0) == ["0.1"]
        maker.put_part(0, 2, last=True)
        for _ in range(2):
            assert await names(delivery, 0, 1) == ["0.2"]
        assert await names(delivery, 0, 2) is None
        maker.put_part(1, 0)
        # An acknowledgement of the batch before is none of this one.
        for part in range(3):
            assert await names(delivery, 0, part) == ["1.0"]

    async def test_waiting_parts_are_joined(self) -> None:
        maker, delivery = made()
        await names(delivery)
        for part in range(3):
            maker.put_part(0, part)
        batch = await delivery.next(0, 1.0, part=0, parts=True)
        assert [failed.uid for failed in batch.failed] == ["0.1", "0.2"]
        assert (batch.number, batch.part, batch.last) == (0, 2, False)

    async def test_call_for_a_full_batch_waits_for_the_last_part(self) -> None:
        maker, delivery = made()
        assert await names(delivery, parts=False) is None
        maker.put_part(0, 0)
        assert await names(delivery, parts=False) is None
        maker.put_part(0, 1, last=True)
        assert await names(delivery, parts=False) == ["0.0", "0.1"]
        assert await names(delivery, 0, None, parts=False) is None

    async def test_the_rest_of_a_batch_begun_in_parts(self) -> None:
        maker, delivery = made()
        await names(delivery)
        maker.put_part(0, 0)
        assert await names(delivery) == ["0.0"]
        assert await names(delivery, 0, 0, parts=False) is None
        assert maker.in_parts == [True, False], "it is said that the rest may come as one"
        maker.put_part(0, 1)
        maker.put_part(0, 2, last=True)
        assert await names(delivery, 0, 0, parts=False) == ["0.1", "0.2"]

    async def test_a_trainer_that_starts_anew_gets_the_batch_from_its_first_part(self) -> None:
        """The gradients of what it had are gone."""
        maker, delivery = made()
        await names(delivery)
        maker.put_part(0, 0)
        maker.put_part(0, 1)
        assert await names(delivery, 0, 0) == ["0.1"]
        assert await names(delivery, 0, 1) is None
        assert await names(delivery) == ["0.0", "0.1"]
        maker.put_part(0, 2, last=True)
        assert await names(delivery, parts=False) == ["0.0", "0.1", "0.2"]

    @pytest.mark.parametrize(("ack", "part"), [(0, -1), (0, 7), (0, 2**70), (9, 0), (0, None)])
    async def test_wrong_acknowledgement_returns_all_parts(
        self, ack: int, part: int | None
    ) -> None:
        maker, delivery = made()
        await names(delivery)
        maker.put_part(0, 0)
        maker.put_part(0, 1)
        assert await names(delivery, ack, part) == ["0.0", "0.1"]

    async def test_delivered_parts_survive_a_failure(self) -> None:
        maker, delivery = made()
        await names(delivery)
        maker.put_part(0, 0)
        delivery.fail(RuntimeError("no more"))
        assert await names(delivery) == ["0.0"]
        with pytest.raises(RuntimeError, match="no more"):
            await names(delivery, 0, 0)
        with pytest.raises(RuntimeError, match="no more"):
            await names(delivery, parts=False)


class Trainer:
    """Trains what arrives; a step is what it has trained of a batch when the last part was."""

    def __init__(self, delivery: BatchDelivery) -> None:
        self.delivery = delivery
        self.received: tuple[int | None, int | None] = (None, None)
        self.step: list[str] = []
        self.steps: list[list[str]] = []

    async def ask(self, *, parts: bool, lost: bool) -> None:
        """`lost`: the answer, on its way."""
        number, part = self.received
        try:
            batch = await self.delivery.next(number, 0, part=part, parts=parts)
        except NotReady:
            return
        if lost:
            return
        self.received = (batch.number, batch.part)
        self.step += [failed.uid for failed in batch.failed]
        if batch.last:
            self.steps.append(self.step)
            self.step = []

    def start_anew(self) -> None:
        """From the last step that it took: the gradients of what it has of the next are lost."""
        if self.step:
            self.received = (None, None)
            self.step = []


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    doings=st.lists(st.sampled_from(["make", "ask", "whole", "lost", "anew"]), max_size=40),
)
def test_each_step_is_of_one_complete_batch(batches: list[int], doings: list[str]) -> None:
    async def scene() -> None:
        maker, delivery = made()
        trainer = Trainer(delivery)
        coming = [
            (n, part, part == size - 1) for n, size in enumerate(batches) for part in range(size)
        ]
        await trainer.ask(parts=True, lost=False)
        for doing in [*doings, *["make", "ask", "ask"] * (len(coming) + 1)]:
            if doing == "make":
                if coming and delivery.awaited:
                    number, part, last = coming.pop(0)
                    maker.put_part(number, part, last=last)
            elif doing == "anew":
                trainer.start_anew()
            else:
                await trainer.ask(parts=doing != "whole", lost=doing == "lost")
        assert trainer.steps == [
            [f"{number}.{part}" for part in range(size)] for number, size in enumerate(batches)
        ]

    virtual_net.run(scene())
