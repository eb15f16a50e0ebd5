"""Transcripts: the pieces joined are what the core counts."""

from __future__ import annotations

from rollout_sched.live.requests.token_payload import Piece, TokenTranscript


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


def test_what_a_stream_brings_after_it_was_kept_does_not_count() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5, 6], [-1.0, -2.0])
    store.keep(3, 2, store.partial(3, 2))
    collect([7], [-3.0])  # its client has yet to hear that it is over
    assert (store.token_ids, store.logprobs) == ([5, 6], [-1.0, -2.0])


def test_a_stream_that_brings_no_log_probabilities_once_has_none() -> None:
    store = TokenTranscript()
    collect = store.collect(3)
    collect([5], [-1.0])
    collect([6], None)
    assert store.partial(3, 2) == Piece([5, 6], None)


class TestDrafts:
    def store(self) -> TokenTranscript:
        """5 6 | observed 9 | 7, of two turns and three attempts."""
        store = TokenTranscript()
        store.keep(1, 1, Piece([5], [-1.0]))
        store.keep(2, 1, Piece([6], [-2.0]))
        store.observe(2, [9])
        store.keep(3, 2, Piece([7, 8], [-3.0, -4.0]))
        return store

    def test_what_was_verified_has_two_log_probabilities(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5])
        assert store.logprobs == [-1.5, -2.5, 0.0, -3.5, -4.0]
        assert store.joined.drawn_logprobs == [-1.0, -2.0, 0.0, -3.0, -4.0]
        assert store.joined.settled == 2

    def test_a_cut_takes_the_last_tokens_and_what_is_known_of_them(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5, -4.5])
        store.cut(1)
        assert (store.token_ids, store.logprobs) == ([5, 6, 9, 7], [-1.5, -2.5, 0.0, -3.5])
        store.keep(4, 1, Piece([3], [-9.0]))
        assert store.logprobs == [-1.5, -2.5, 0.0, -3.5, -9.0]

    def test_a_cut_may_take_a_turn_as_a_whole(self) -> None:
        store = self.store()
        store.cut(2)
        assert (store.token_ids, store.joined.mask) == ([5, 6, 9], [1, 1, 0])

    def test_nothing_is_left_of_what_a_tool_has_answered_in_part(self) -> None:
        store = self.store()
        store.verified([-1.5, -2.5, -3.5, -4.5])
        store.cut(3)
        assert (store.token_ids, store.logprobs, store.joined.settled) == ([], [], 0)

    def test_a_cut_goes_over_attempts_of_one_turn(self) -> None:
        store = TokenTranscript()
        for attempt in (1, 2, 3):
            store.keep(attempt, 2, Piece([attempt] * 2, [-1.0] * 2))
        store.cut(3)
        assert store.token_ids == [1, 1, 2]

    def test_starting_over_forgets_what_was_verified(self) -> None:
        store = self.store()
        store.verified([-1.5])
        store.drop(0)
        store.keep(7, 1, Piece([4], [-0.5]))
        assert store.logprobs == [-0.5]
