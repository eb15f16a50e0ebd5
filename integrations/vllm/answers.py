"""From the pieces of an answer to an Output: joined, and believed only where they can be true."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from rollout_sched.core.events import Spans
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    OnTokens,
    Order,
    Output,
    WeightsUnknown,
)

Finish = Literal["stop", "length", "abort"]

#: vLLM's finish reasons in the driver's words. "error" is none of them: it comes as a 500.
FINISH: dict[str, Finish] = {
    "stop": "stop",
    "repetition": "stop",  # the stop rule of `repetition_detection`
    "length": "length",
    "abort": "abort",
}
_LABEL_OF_A_START = "default"  # vLLM's, until it is given another
_LONGEST_LABEL = 18  # digits of a version; a 64-bit integer holds any of them


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) of an answer were made under the label `version`."""

    version: str
    start: int
    end: int


class Piece(msgspec.Struct):
    """One chunk of a stream, or a whole answer. `versions` come with the last piece, if at all."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    finish: str | None = None
    versions: list[VersionSpan] | None = None


def version_of(label: object) -> int | None:
    """The policy version a weight label names; None for labels of other kinds ("default")."""
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label) if len(label) <= _LONGEST_LABEL else None
    return None


def spans_of(versions: list[VersionSpan], tokens: int, *, labelled: bool = False) -> Spans:
    """(version, tokens) of an answer of `tokens` tokens; empty if any label is no version.

    Raises AnswerUntrue if the spans do not cover the tokens one after the other. `labelled`: the
    instance was given a label before it was asked; raises WeightsUnknown if a span has that of a
    start.
    """
    bounds = [0, *(span.end for span in versions)]
    starts = [span.start for span in versions]
    if starts != bounds[:-1] or bounds[-1] != tokens or any(a >= b for a, b in pairwise(bounds)):
        raise AnswerUntrue(f"weight_versions {versions} do not cover its {tokens} tokens")
    spans: list[tuple[int, int]] = []
    for span in versions:
        version = version_of(span.version)
        if version is None:
            if labelled and any(span.version == _LABEL_OF_A_START for span in versions):
                raise WeightsUnknown(
                    f"its tokens carry the label {_LABEL_OF_A_START!r}, which it has only until it "
                    "is given ours: it was restarted, and made them with the weights of its start"
                )
            return ()
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + span.end - span.start)
        else:
            spans.append((version, span.end - span.start))
    return tuple(spans)


class Assembly:
    """Joins the pieces of one answer and hands streamed tokens on.

    An answer that breaks off is an InstanceError, one that cannot be true an AnswerUntrue.
    `labelled` as for `spans_of`.
    """

    def __init__(
        self, order: Order, on_tokens: OnTokens | None = None, *, labelled: bool = False
    ) -> None:
        self._limit = order.max_new_tokens
        self._wants_logprobs = order.sampling.get("logprobs") is not None
        self._on_tokens = on_tokens
        self._labelled = labelled
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._versions: list[VersionSpan] | None = None

    def add(self, piece: Piece) -> None:
        tokens = len(piece.token_ids)
        if self._finish is not None and (tokens or piece.finish is not None):
            raise AnswerUntrue("it sent more after the end of an answer")
        if len(self._token_ids) + tokens > self._limit:
            raise AnswerUntrue(f"it sent more than the {self._limit} tokens it may make")
        logprobs = piece.logprobs if piece.logprobs is not None else []
        if self._wants_logprobs and len(logprobs) != tokens:
            raise AnswerUntrue(f"it sent {len(logprobs)} log-probs with {tokens} tokens")
        if piece.finish is not None:
            if piece.finish not in FINISH:
                raise AnswerUntrue(f"it ended with finish_reason {piece.finish[:80]!r}")
            self._finish = FINISH[piece.finish]
            self._versions = piece.versions
        self._token_ids += piece.token_ids
        if self._wants_logprobs:
            self._logprobs += logprobs
        if self._on_tokens is not None and tokens:
            self._on_tokens(piece.token_ids, logprobs if self._wants_logprobs else None)

    def output(self) -> Output:
        """The whole answer."""
        if self._finish is None:
            raise InstanceError("its answer broke off before a finish_reason")
        spans: Spans = ()
        if self._versions:
            spans = spans_of(self._versions, len(self._token_ids), labelled=self._labelled)
        return self._as_output(self._finish, spans)

    def cut(self) -> Output:
        """What has come so far, as the answer to an abort."""
        return self._as_output("abort", ())

    def _as_output(self, finish: Finish, spans: Spans) -> Output:
        logprobs = self._logprobs if self._wants_logprobs else None
        return Output(self._token_ids, logprobs, finish, spans)
