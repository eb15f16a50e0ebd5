"""Pieces of a response, one for each attempt, read as the one response that they are."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Piece(msgspec.Struct):
    """Tokens of one attempt, with their log-probabilities if they were asked for.

    `observed`: the tokens that a tool returned to the turn which the attempt ended.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    observed: list[int] | None = None


class JoinedPieces:
    """In their order: tokens that were generated, and between two turns of a trajectory those that
    its tool returned."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Mapping[int, Piece]) -> None:
        self._pieces = pieces

    @property
    def token_ids(self) -> list[int]:
        """Generated and observed."""
        ids: list[int] = []
        for piece in self._pieces.values():
            ids += piece.token_ids
            ids += piece.observed or ()
        return ids

    @property
    def drawn_logprobs(self) -> list[float]:
        """One for each of `token_ids`, by the weights that drew it, if they were asked for; 0.0
        where they were observed."""
        values: list[float] = []
        for piece in self._pieces.values():
            values += piece.logprobs or ()
            values += [0.0] * len(piece.observed or ())
        return values

    @property
    def mask(self) -> list[int]:
        """1 for each of `token_ids` that was generated, 0 for those that were observed."""
        mask: list[int] = []
        for piece in self._pieces.values():
            mask += [1] * len(piece.token_ids)
            mask += [0] * len(piece.observed or ())
        return mask

    @property
    def turns(self) -> int:
        """Turns that a tool has returned to."""
        return sum(piece.observed is not None for piece in self._pieces.values())

    @property
    def turn_ids(self) -> list[int]:
        """What was generated since a tool last returned."""
        ids: list[int] = []
        for piece in self._pieces.values():
            ids = [] if piece.observed is not None else ids + piece.token_ids
        return ids

    @property
    def settled(self) -> int:
        """Generated tokens that a tool has answered."""
        made = settled = 0
        for piece in self._pieces.values():
            made += len(piece.token_ids)
            settled = settled if piece.observed is None else made
        return settled
