"""Tokens as bytes."""

from __future__ import annotations

import math
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.transaction import Tokens, Transaction, decode, encode

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(ids=IDS, observed=st.none() | IDS, data=st.data(), width=st.sampled_from((32, 64)))
def test_written_pieces_are_read(ids, observed, data, width):
    floats = st.floats(allow_nan=False, width=width)
    logprobs = data.draw(st.none() | st.lists(floats, min_size=len(ids), max_size=len(ids)))
    tokens = Tokens(ids, logprobs, observed)
    read = decode(encode(tokens))
    assert read.ids == ids
    assert read.observed == observed
    assert read.logprobs == logprobs or not ids


def test_eight_bytes_a_token_and_twelve_a_piece():
    ids, logprobs = list(range(100)), [-0.5] * 100
    assert len(encode(Tokens(ids))) == 12 + 400
    assert len(encode(Tokens(ids, logprobs))) == 12 + 800
    assert len(encode(Tokens(ids, [-0.1] * 100))) == 12 + 1200  # 0.1 is no float32


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_log_probs_of_any_kind_of_number_are_read(count):
    for made in ([-0.5], [-1], [-(2**40)], [-0.1, -1], [np.float64(-0.1)], [1e300, math.inf]):
        logprobs = (made * count)[:count]
        tokens = Tokens([7] * count, logprobs)
        data = encode(tokens)
        assert decode(data).logprobs == logprobs
        assert len(data) <= tokens.max_bytes


def test_an_id_beyond_31_bits_is_refused():
    with pytest.raises(struct.error):
        encode(Tokens([2**31]))


@given(st.binary(max_size=64))
def test_other_bytes_are_damaged_or_tokens(data):
    try:
        tokens = decode(data)
    except PieceDamaged:
        return
    assert len(data) >= 12 + 4 * len(tokens.ids)


def test_a_piece_that_ends_early_is_damaged():
    data = encode(Tokens([1, 2, 3], [-1.0, -2.0, -3.0]))
    for end in range(len(data)):
        with pytest.raises(PieceDamaged):
            decode(data[:end])
    with pytest.raises(PieceDamaged):
        decode(struct.pack("<BBxxII", 3, 0, 0, 0))


# -- Transactions that are put into one --


def test_the_last_word_counts():
    first, second = Transaction(), Transaction()
    first.put("group", "a", b"1")
    first.put("group", "b", b"1")
    first.append("x", 0, b"1")
    first.append("y", 0, b"1")
    second.put("group", "a", b"2")
    second.drop("group", "b")
    second.take_back("x", 0)
    second.append("y", 1, b"2")
    first.add(second)
    assert first.facts == {("group", "a"): b"2", ("group", "b"): None}
    assert list(first.written()) == [("y", 0, b"1"), ("y", 1, b"2")]
    assert first.taken_back() == [("x", 0)]


def test_pieces_after_a_clear_are_the_new_ones_only():
    first, second = Transaction(), Transaction()
    first.append("x", 0, b"1")
    second.clear("x")
    second.append("x", 5, b"2")
    first.add(second)
    assert list(first.written()) == [("x", 5, b"2")]
    assert first.cleared == {"x"}


def test_nothing_is_false():
    changes = Transaction()
    assert not changes
    changes.drop("group", "a")
    assert changes


def test_tokens_are_encoded_when_they_are_written():
    changes, tokens = Transaction(), Tokens([1, 2], [-1.0, -0.1], [3])
    changes.append("x", 0, tokens)
    assert list(changes.written()) == [("x", 0, encode(tokens))]
    assert changes.size >= len(encode(tokens))
