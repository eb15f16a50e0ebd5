"""What a page draws of a run."""

from __future__ import annotations

from rollout_sched.page.run_page import QUANTILES, RunRecord, quantiles
from tests.page.runs import many


def test_thinned_is_every_so_manieth_request() -> None:
    record = many(1000).record
    thin = record.thinned(4)
    assert len(record) == 1000
    assert len(thin) == 250
    assert set(thin.attempts["request"].tolist()) == set(range(0, 1000, 4))
    assert _starts(thin) == [one for one in _starts(record) if one[0] % 4 == 0]


def _starts(record: RunRecord) -> list[tuple[int, float]]:
    """Of the spans, by request."""
    requests = record.attempts["request"][record.spans["attempt"]].tolist()
    return list(zip(requests, record.spans["start"].tolist(), strict=True))


def test_quantiles() -> None:
    assert quantiles([]) == []
    found = quantiles([5, 1, 3])
    assert (found[0], found[QUANTILES // 2], found[-1]) == (1, 3, 5)
    assert len(found) == QUANTILES
