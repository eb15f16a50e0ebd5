"""Transcripts: the pieces joined are what the core counts."""

from __future__ import annotations

from rollout_sched.live.transcript import Piece, TokenTranscript


def test_pieces_join_in_order() -> None:
    store = TokenTranscript()
    store.keep(1, 2, Piece([5, 6], [-1.0, -2.0]))
    store.keep(4, 1, Piece([7], [-3.0]))
    assert store.token_ids == [5, 6, 7]
    assert store.logprobs == [-1.0, -2.0, -3.0]
    assert store.attempts == 2


def test_no_more_is_kept_than_counts() -> None:
    store = TokenTranscript()
    store.keep(1, 1, Piece([5, 6], [-1.0, -2.0]))
    assert (store.token_ids, store.logprobs) == ([5], [-1.0])
    store.keep(2, 0, Piece([9], [-1.0]))
    assert store.attempts == 1


def test_dropping_one_or_all() -> None:
    store = TokenTranscript()
    store.keep(1, 1, Piece([5], [-1.0]))
    store.keep(2, 1, Piece([6], [-1.0]))
    store.drop(1)
    assert store.token_ids == [6]
    store.drop(0)
    assert store.token_ids == []


def test_of_a_stream_only_what_counts_is_kept() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    collect([7], [-3.0])
    assert (store.streamed(3), store.attempts) == (3, 0)
    store.keep(3, 2, store.partial(3, 2))
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])
    assert store.streamed(3) == 0


def test_a_stream_that_brings_no_log_probabilities_once_has_none() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5], [-1.0])
    collect([6], None)
    assert store.partial(3, 2) == Piece([5, 6], None)
