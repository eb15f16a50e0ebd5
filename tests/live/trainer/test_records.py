"""Facts as a store holds them."""

from __future__ import annotations

from contextlib import closing

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.records import StoredPrompt, StoredTranscripts
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.store.store import Store
from rollout_sched.store.transaction import Transaction, decode


def test_a_prompt_is_a_fact_and_its_tokens_are_a_piece():
    prompt = Prompt("a", list(range(1000)), 2, 9, {"logprobs": 0}, extra={"answer": [1, {}]})
    fact, tokens = facts.encoded_prompt(prompt, tool="search")
    assert len(fact) < 200
    assert decode(tokens).ids == prompt.prompt_ids
    stored = facts.decoded(fact, StoredPrompt)
    assert (stored.tool, stored.tool_name) == (True, "search")
    _, without = facts.encoded_prompt(prompt, tool=None)
    assert without == tokens
    assert stored.prompt.prompt_ids == [0]
    assert (stored.prompt.extra, stored.prompt.sampling) == (prompt.extra, prompt.sampling)


def test_a_delivery_comes_back_as_it_was():
    sample = DeliveredSample("a/0", "a", 0, 3, 2, (Segment(1, 2, "i0"),), 1, "stop")
    action = Deliver(4, 2, (sample,), 1, False)
    assert facts.decoded(facts.encoded(action), Deliver) == action
    assert facts.delivery_name(action) == "4.1"


def test_owner_of_prompt_tokens_differs_from_a_request():
    owner = facts.prompt_owner("p:a/0")
    assert facts.uid_of_owner(owner) == "p:a/0"
    assert facts.uid_of_owner("r:p:a/0") is None


def test_a_loss_is_keyed_by_group_and_batch():
    names = [facts.loss_name("a:1", batch) for batch in (None, 4)]
    assert names == [":a:1", "4:a:1"]
    assert [facts.lost_group(name) for name in names] == ["a:1", "a:1"]


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path, durable="off")) as store:
        yield store


class Kept:
    """A transcript of one request that is written again and again."""

    def __init__(self, store):
        self.store = store
        self.transcript = TokenTranscript()
        self.stored = StoredTranscripts(store)

    def write(self, streamed=()):
        changes = Transaction()
        self.stored.write("a/0", self.transcript, changes, streamed)
        self.store.apply(changes)
        return changes

    def read(self):
        """As the next epoch finds it."""
        stored, found = StoredTranscripts(self.store), TokenTranscript()
        counted = stored.restore("a/0")
        stored.read("a/0", found)
        generated = sum(found.joined.mask)
        assert counted == (generated, len(found.joined.mask) - generated)
        return found


def same(one, other):
    assert one.pieces == other.pieces
    assert one.logprobs == other.logprobs


def test_only_new_tokens_are_written(store):
    kept = Kept(store)
    kept.write([(1, Piece([5], [-1.0]))])
    assert len(list(kept.write([(1, Piece([5, 6], [-1.0, -2.0]))]).written())) == 1
    assert not kept.write([(1, Piece([5, 6], [-1.0, -2.0]))])
    kept.transcript.append(1, 3, Piece([5, 6, 7], [-1.0, -2.0, -3.0]))
    ((owner, _, data),) = kept.write().written()
    assert (owner, len(data)) == ("r:a/0", 12 + 8)
    same(kept.read(), kept.transcript)


def test_tool_tokens_follow_their_turn(store):
    kept = Kept(store)
    kept.transcript.append(1, 2, Piece([5, 6], None))
    kept.write()
    kept.transcript.observe(1, [70, 71])
    kept.write()
    kept.transcript.append(4, 1, Piece([8], None))
    kept.transcript.observe(4, [])
    kept.write()
    found = kept.read()
    assert found.token_ids == [5, 6, 70, 71, 8]
    assert found.joined.mask == [1, 1, 0, 0, 1]
    same(found, kept.transcript)


def test_forgotten_transcript_is_not_read(store):
    kept = Kept(store)
    kept.transcript.append(1, 2, Piece([5, 6], None))
    kept.write()
    stored, changes = StoredTranscripts(store), Transaction()
    stored.restore("a/0")
    assert stored.owners() == {"r:a/0"}
    stored.forget("a/0", changes)
    found = TokenTranscript()
    stored.read("a/0", found)  # before that is written
    assert found.token_ids == []
    store.apply(changes)
    assert store.owners() == []


STEP = st.one_of(
    st.tuples(st.just("keep"), st.integers(1, 5)),
    st.tuples(st.just("drop"), st.integers(0, 6)),
    st.tuples(st.just("observe"), st.integers(0, 3)),
    st.tuples(st.just("stream"), st.integers(1, 5)),
)


@given(st.lists(STEP, max_size=12))
def test_stored_transcript_equals_the_live_one(tmp_path_factory, steps):
    with closing(Store(tmp_path_factory.mktemp("store"), durable="off")) as store:
        kept, attempt = Kept(store), 0
        for what, number in steps:
            streamed = []
            if what in ("keep", "stream"):
                attempt += 1
                piece = Piece([attempt * 10 + n for n in range(number)], [-0.5 * attempt] * number)
                if what == "keep":
                    kept.transcript.append(attempt, number, piece)
                else:
                    streamed = [(attempt, piece)]
            elif what == "observe":
                pieces = dict(kept.transcript.pieces)
                if attempt in pieces and pieces[attempt].observed is None:  # a tool returns once
                    kept.transcript.observe(attempt, [99] * number)
            else:
                kept.transcript.drop(number)
            kept.write(streamed)
        kept.write()
        same(kept.read(), kept.transcript)


LIVE_STEP = st.one_of(
    st.tuples(st.just("bring"), st.integers(1, 5)),
    st.tuples(st.just("break_off"), st.integers(1, 5)),
    st.tuples(st.just("observe"), st.integers(0, 3)),
)


@given(st.lists(LIVE_STEP, max_size=12))
def test_pieces_handed_to_the_writer_are_never_changed(tmp_path_factory, steps):
    """Its thread encodes tokens later, from the very lists of the transcript."""
    with closing(Store(tmp_path_factory.mktemp("store"), durable="off")) as store:
        stored, transcript = StoredTranscripts(store), TokenTranscript()
        attempt, collect, handed_over = 1, transcript.collect(1), []
        for what, number in steps:
            if what == "bring":
                collect([attempt] * number, [-0.5] * number)
            elif what == "break_off":
                tokens = min(number, transcript.streamed(attempt))
                transcript.append(attempt, tokens, transcript.partial(attempt, tokens))
            else:
                transcript.observe(attempt, [99] * number)
            changes = Transaction()
            stored.write("a/0", transcript, changes)
            handed_over.append((changes, list(changes.written())))
            if what == "break_off":
                collect([attempt], [-0.5])  # its client has yet to hear that it is over
                attempt += 1
                collect = transcript.collect(attempt)
        for changes, at_once in handed_over:
            assert list(changes.written()) == at_once
