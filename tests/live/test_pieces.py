"""Pieces read as one response: what was generated, what tools returned and so settled."""

from __future__ import annotations

from rollout_sched.live.requests.token_payload import JoinedPieces, Piece


def joined(*pieces: Piece) -> JoinedPieces:
    return JoinedPieces(dict(enumerate(pieces, 1)))


def test_nothing_was_made_yet() -> None:
    empty = joined()
    assert (empty.token_ids, empty.mask, empty.drawn_logprobs) == ([], [], [])
    assert (empty.turns, empty.turn_ids, empty.settled) == (0, [], 0)


def test_a_response_of_several_attempts_is_one_turn() -> None:
    response = joined(Piece([5, 6], [-1.0, -2.0]), Piece([7], [-3.0]))
    assert response.token_ids == response.turn_ids == [5, 6, 7]
    assert (response.mask, response.turns, response.settled) == ([1, 1, 1], 0, 0)
    assert response.drawn_logprobs == [-1.0, -2.0, -3.0]


def test_what_a_tool_returned_stands_between_turns_and_settles_what_came_before() -> None:
    response = joined(
        Piece([5], [-1.0]), Piece([6], [-2.0], observed=[9, 9]), Piece([7, 8], [-3.0, -4.0])
    )
    assert response.token_ids == [5, 6, 9, 9, 7, 8]
    assert response.mask == [1, 1, 0, 0, 1, 1]
    assert response.drawn_logprobs == [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0]
    assert (response.turns, response.turn_ids, response.settled) == (1, [7, 8], 2)


def test_a_tool_may_return_nothing() -> None:
    response = joined(Piece([5], None, observed=[]))
    assert (response.turns, response.turn_ids, response.settled) == (1, [], 1)
    assert (response.token_ids, response.drawn_logprobs) == ([5], [])
