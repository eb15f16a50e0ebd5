"""Transactions that are put into one."""

from __future__ import annotations

from rollout_sched.store.transaction import Tokens, Transaction, encode


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
    assert set(first.named()) == {("x", 0), ("y", 0), ("y", 1)}


def test_what_is_cleared_and_written_again_is_only_what_is_new():
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
