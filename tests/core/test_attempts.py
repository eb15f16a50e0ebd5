"""The ledger: what an answer says is believed as far as it can be true."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from tests.core.told import LIMIT, PROMPT, Told


def told() -> Told:
    told = Told(version=5)
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    return told


@pytest.mark.parametrize(
    ("spans", "believed", "anomaly"),
    [
        ((), [(5, 7)], ""),
        (((5, 7),), [(5, 7)], ""),
        (((4, 3), (5, 4)), [(4, 3), (5, 4)], "version_older_than_dispatched"),
        (((5, 0), (5, 7)), [(5, 7)], ""),
        (((5, 6),), [(5, 7)], "spans_do_not_fit"),
        (((5, -1), (5, 8)), [(5, 7)], "spans_do_not_fit"),
        (((5, 3), (4, 4)), [(5, 7)], "spans_do_not_fit"),
        (((6, 7),), [(5, 7)], "spans_do_not_fit"),
    ],
)
def test_spans(
    spans: tuple[tuple[int, int], ...], believed: list[tuple[int, int]], anomaly: str
) -> None:
    here = told()
    (answer,) = here(RequestFinished("d", 1, 7, spans))
    assert [(s.version, s.tokens) for s in answer.sample.segments] == believed
    assert here.anomalies == ({anomaly: 1} if anomaly else {})


@pytest.mark.parametrize(("tokens", "counted"), [(-3, 0), (0, 0), (LIMIT, LIMIT), (10**9, LIMIT)])
def test_tokens_are_those_it_can_have_made(tokens: int, counted: int) -> None:
    here = told()
    (answer,) = here(RequestFinished("d", 1, tokens))
    assert answer.sample.response_tokens == counted
    assert here.anomalies == ({} if tokens == counted else {"tokens_out_of_range": 1})


@pytest.mark.parametrize(("request_", "attempt"), [("d", 2), ("e", 1), ("", 0)])
def test_an_answer_to_no_attempt_in_flight_changes_nothing(request_: str, attempt: int) -> None:
    here = told()
    assert here(RequestFinished(request_, attempt, 7)) == []
    assert here.anomalies == {"unknown_attempt": 1}
    assert here.scheduler.view.in_flight == 1
