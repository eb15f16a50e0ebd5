"""Pieces of a response, one for each attempt, and their view as one response."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Piece(msgspec.Struct):
    """Tokens of one attempt, with their log-probabilities if they were requested.

    `observed`: the tokens that a tool returned for the turn that the attempt ended.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    observed: list[int] | None = None


class JoinedPieces:
    """The pieces in order: generated tokens, and between two turns of a trajectory the tokens that
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
        """One for each of `token_ids`, under the weights that drew it, if requested; 0.0 for
        observed tokens."""
        values: list[float] = []
        for piece in self._pieces.values():
            values += piece.logprobs or ()
            values += [0.0] * len(piece.observed or ())
        return values

    @property
    def mask(self) -> list[int]:
        """1 for each generated token of `token_ids`, 0 for each observed one."""
        mask: list[int] = []
        for piece in self._pieces.values():
            mask += [1] * len(piece.token_ids)
            mask += [0] * len(piece.observed or ())
        return mask

    @property
    def turns(self) -> int:
        """Number of turns that a tool has answered."""
        return sum(piece.observed is not None for piece in self._pieces.values())

    @property
    def turn_ids(self) -> list[int]:
        """The tokens generated since the last answer of a tool."""
        ids: list[int] = []
        for piece in self._pieces.values():
            ids = [] if piece.observed is not None else ids + piece.token_ids
        return ids

    @property
    def settled(self) -> int:
        """Number of generated tokens that a tool has answered."""
        made = settled = 0
        for piece in self._pieces.values():
            made += len(piece.token_ids)
            settled = settled if piece.observed is None else made
        return settled
