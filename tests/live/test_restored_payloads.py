"""Payloads that go on with stored tokens."""

from __future__ import annotations

from contextlib import closing

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.live.durable.records import StoredTranscripts
from rollout_sched.live.durable.recovery import Recovered, RestoredPayloads
from rollout_sched.live.requests.token_payload import Piece, TokenPayload, TokenTranscript
from rollout_sched.live.trainer.samples import FailedGroup, Prompt
from rollout_sched.store.store import Store
from rollout_sched.store.transaction import Transaction

PROMPT = Prompt("a", [1, 2], 1, 9)


def make(prompt, index):
    return TokenPayload(prompt.prompt_ids, prompt.sampling_of(index))


def test_tokens_are_read_when_they_are_needed(tmp_path):
    with closing(Store(tmp_path, durable="off")) as store:
        transcript, stored, changes = TokenTranscript(), StoredTranscripts(store), Transaction()
        transcript.keep(1, 2, Piece([5, 6], None))
        stored.write("a/0", transcript, changes)
        store.apply(changes)
        sample = DeliveredSample("a/0", "a", 0, 2, 2, (Segment(0, 2, "i0"),), 0, "stop")
        found = Recovered(
            prompts={"a": PROMPT},
            deliveries=[Deliver(0, 0, (sample,))],
            told={0: [FailedGroup("b", "why")]},
        )
        payloads = RestoredPayloads(found, stored, make)
        (batch,) = payloads.batches()
        assert batch.samples[0].response_ids == [5, 6]
        assert batch.failed == [FailedGroup("b", "why")]
        assert payloads.factory(PROMPT)(0).response_ids == [5, 6]
        assert payloads.factory(PROMPT)(1).response_ids == []


def test_the_newest_part_that_is_there_tells_who_had_failed(tmp_path):
    """A trainer that starts anew gets a batch from its first part on, and parts that are made
    later do not tell it again."""
    parts = [Deliver(0, 0, (), part=0, last=False), Deliver(0, 0, (), part=1, last=False)]
    failed = FailedGroup("b", "why")
    with closing(Store(tmp_path, durable="off")) as store:
        found = Recovered(deliveries=parts, told={0: [failed]})
        payloads = RestoredPayloads(found, StoredTranscripts(store), make)
        assert [batch.failed for batch in payloads.batches()] == [[], [failed]]
