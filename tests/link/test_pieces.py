"""The tokens of a group are the same at both ends, whatever happens to them."""

from __future__ import annotations

from typing import Any

from rollout_sched.link.pieces import GroupPieces, add_piece, add_streamed, pieces_of
from rollout_sched.link.protocol import PieceMade, ReleaseGroup, TakeGroup
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenPayload, TokenTranscript


def book() -> Payloads:
    payloads = Payloads()
    payloads.add_group("g", lambda index: TokenPayload([1], {"logprobs": 0}))
    return payloads


class Front:
    """A front with group g."""

    def __init__(self, *pieces: PieceMade) -> None:
        self.payloads = book()
        self.pieces = GroupPieces(self.payloads)
        self.pieces.take(TakeGroup("g", b"", pieces))

    def transcript(self, request: str = "g/0") -> TokenTranscript:
        payload = self.payloads.of_sample("g", 0, request)
        assert isinstance(payload.transcript, TokenTranscript)
        return payload.transcript


def test_piece_is_sent_once() -> None:
    front, host = Front(), book()
    front.transcript().append(3, 2, Piece([7, 8], [-0.5, -0.25]))
    made = front.pieces.piece_of("g/0", 3)
    assert made is not None
    add_piece(host, made)
    payload: Any = host.get("g/0")
    assert payload.transcript.pieces == front.transcript().pieces
    assert front.pieces.piece_of("g/0", 4) is None, "it generated nothing"


def test_only_the_unstreamed_rest_of_a_piece_is_sent() -> None:
    front, host = Front(), book()
    bring = front.transcript().collect(3)
    for ids in ([7], [8, 9], []):
        bring(ids, [-0.5] * len(ids))
        said = front.pieces.streamed("g/0", 3, front.transcript().streamed(3))
        assert said is not None
        add_streamed(host, said)
    payload: Any = host.get("g/0")
    assert payload.transcript.partial(3, 3) == Piece([7, 8, 9], [-0.5] * 3)
    front.transcript().append(3, 4, Piece([7, 8, 9, 10], [-0.5] * 4))
    made = front.pieces.piece_of("g/0", 3)
    assert made.start == 3
    add_piece(host, made)
    assert payload.transcript.pieces == front.transcript().pieces
    assert not payload.transcript.streamed(3)


def test_a_piece_may_be_less_than_was_streamed() -> None:
    front, host = Front(), book()
    front.transcript().collect(3)([7, 8, 9], None)
    said = front.pieces.streamed("g/0", 3, 3)
    assert said is not None
    add_streamed(host, said)
    front.transcript().append(3, 2, Piece([7, 8], None))
    made = front.pieces.piece_of("g/0", 3)
    assert made is not None
    add_piece(host, made)
    payload: Any = host.get("g/0")
    assert payload.transcript.pieces == [(3, Piece([7, 8], None))]


def test_tool_tokens_follow_their_turn() -> None:
    front, host = Front(), book()
    for _ in range(2):
        front.transcript().append(3, 2, Piece([7, 8], None))
        made = front.pieces.piece_of("g/0", 3)
        assert made is not None
        add_piece(host, made)
        front.transcript().observe(3, [9])
    made = front.pieces.piece_of("g/0", 3)
    assert made is None or add_piece(host, made) is None
    payload: Any = host.get("g/0")
    assert payload.transcript.token_ids in ([7, 8], [7, 8, 9])


def test_another_front_continues_from_all_pieces() -> None:
    front = Front()
    front.transcript().append(3, 2, Piece([7, 8], [-0.5, -0.25]))
    other = Front(*pieces_of(front.payloads, "g/0"))
    assert other.transcript().pieces == front.transcript().pieces
    assert other.transcript().logprobs == [-0.5, -0.25]
    assert pieces_of(front.payloads, "g/1") == []


async def test_no_pieces_for_clients_and_ended_groups() -> None:
    front = Front()
    front.transcript().append(3, 2, Piece([7, 8], None))
    client = TokenPayload([1], {})
    client.transcript.append(4, 1, Piece([5], None))
    front.payloads.add("run.f0.1", client)
    assert front.pieces.piece_of("run.f0.1", 4) is None
    front.pieces.release(ReleaseGroup("g", ("g/0",)))
    assert front.pieces.piece_of("g/0", 3) is None


def test_filtered_or_failed_group_leaves_no_pieces() -> None:
    front = Front()
    front.transcript().append(3, 1, Piece([7], [-0.5]))
    assert front.pieces.piece_of("g/0", 3) is not None
    front.pieces.release(ReleaseGroup("g"))
    assert not front.pieces._groups
