"""The page of runs: small enough, and honest about what it leaves out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceReported,
    RequestInterrupted,
    Woke,
)
from rollout_sched.inspection.recording import Recording
from rollout_sched.metrics.attempts import OUTCOMES
from rollout_sched.metrics.fold import Folded
from rollout_sched.page import run_page
from rollout_sched.page.run_page import (
    ALONE,
    FINEST_S,
    MAX_BUCKETS,
    QUANTILES,
    AttemptTables,
    FleetLevels,
    LevelSeries,
    RunFold,
    RunRecord,
    quantiles,
)
from tests.inspection.journals import recorded
from tests.page.runs import many, page_of, small
from tests.page.test_assembly import unpacked


def data_of(page: bytes) -> Any:
    found = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page.decode())
    return unpacked(found[1])


def test_page_holds_all_given_data() -> None:
    data = data_of(page_of(small(), small(policy="other"), verdict=["v"], about=["a"]))
    assert [policy["name"] for policy in data["policies"]] == ["fcfs", "other"]
    assert (data["verdict"], data["about"], data["note"]) == (["v"], ["a"], "")
    assert data["policies"][0]["record"]["spans"]["tokens"] == [20, 10, 30]


def test_page_is_small() -> None:
    assert len(page_of(many(10_000))) < 2**20


def test_too_many_attempts_are_thinned_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "MAX_RECORDS", 500)
    data = data_of(page_of(many(1200)))
    assert len(data["policies"][0]["record"]["attempts"]["request"]) == 400
    assert "One request in 3 is drawn" in data["note"]


def test_a_prompt_s_name_cannot_end_the_script() -> None:
    page = page_of(small("</script><script>alert(1)</script>"))
    assert b"alert(1)" not in page


def test_thinning_keeps_every_nth_request() -> None:
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


@pytest.mark.parametrize("policy", ["dplb", "april"])
def test_small_run_has_its_record(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    trace, run = recorded(path, policy, trace="lrm_math_open")
    fold = RunFold()
    end_s = Recording(path).tell([fold.observe])
    record = fold.record(end_s, [])
    assert len(record.instances) == 6
    made = sum(step.generated_tokens for step in run.steps)
    assert record.spans["tokens"].sum() == made
    assert len(record.requests["group"]) == trace.sample_count
    assert set(record.groups) == set(trace.groups)
    assert sum(kind == "delivered" for _, kind, _ in record.marks) == run.summary.steps
    assert record.lengths[-1] == max(
        sample.response_tokens for group in trace.groups.values() for sample in group
    )
    assert all(0 <= share <= 1 for share in record.fleet["kv"])
    assert max(record.fleet["kv_most"]) > 0
    assert max(record.fleet["in_flight"]) > 1
    resumed = OUTCOMES.index("interrupted") in record.attempts["outcome"].tolist()
    assert resumed == (policy == "april")


def test_attempts_have_slots_waits_and_versions() -> None:
    record = small().record
    assert record.attempts["place"].tolist() == [1, 2]
    assert record.attempts["waited"].tolist() == [0.0, 4.0]
    assert record.spans["version"].tolist() == [3, 3, 4]
    assert record.spans["attempt"].tolist() == [1, 0, 0]
    assert ALONE not in record.requests["index"].tolist()


def test_a_request_is_one_row_and_each_of_its_attempts_another() -> None:
    tables = AttemptTables()
    folded = Folded(*tables.folds)
    folded.observe(0.0, InstanceJoined("i", 4, 1000, 2), [])
    folded.observe(1.0, Woke(), [Dispatch("g/1", 1, "i", 10, 40, 2, group="g", index=1)])
    folded.observe(2.0, RequestInterrupted("g/1", 1, 8), [])
    again = Dispatch("g/1", 2, "i", 18, 32, 2, response_tokens=8, group="g", index=1)
    folded.observe(5.0, Woke(), [again, Dispatch("d", 3, "i", 10, 40, 2)])
    assert tables.in_flight == 2
    found = {
        name: {key: column.tolist() for key, column in table.items()}
        for name, table in tables.columns(9.0).items()
    }
    assert list(tables.groups) == ["g", "d"]
    assert found["requests"] == {"group": [0, 1], "index": [1, ALONE]}
    assert found["attempts"]["request"] == [0, 0, 1]
    assert found["attempts"]["before"] == [0, 8, 0]
    assert found["attempts"]["waited"] == [0.0, 3.0, 0.0]
    outcomes = [OUTCOMES[number] for number in found["attempts"]["outcome"]]
    assert outcomes == ["interrupted", "still running", "still running"]
    assert found["spans"]["length"] == [1.0, 4.0, 4.0]


def test_levels_sum_the_reports_of_all_instances() -> None:
    levels = FleetLevels()
    levels.set(0.0, 3, 1)
    levels.report(0.0, InstanceReported("i", 1, 2, 0.2))
    levels.report(0.0, InstanceReported("j", 1, 4, 0.6))
    levels.report(1.0, InstanceReported("j", 1, 0, 0.0))
    told = levels.summary(2.0)
    half = round(1.0 / told["width_s"])
    assert set(told["in_flight"]) == {3.0}
    assert set(told["queued"][:half]) == {6.0}
    assert set(told["queued"][half:]) == {2.0}
    assert set(told["kv"][:half]) == {0.4}
    assert set(told["kv_most"][half + 1 :]) == {0.2}


def test_levels_leave_out_gone_instances() -> None:
    levels = FleetLevels()
    levels.report(0.0, InstanceReported("i", 1, 2, 0.2))
    levels.report(0.0, InstanceReported("j", 1, 4, 0.6))
    levels.instance_gone("j")
    levels.report(1.0, InstanceReported("i", 1, 2, 0.2))
    assert levels.summary(2.0)["queued"][-1] == 2.0


CHANGES = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 100)), max_size=40)


@given(CHANGES, st.floats(0, 50))
def test_no_area_is_lost(changes: list[tuple[float, float]], rest_s: float) -> None:
    series, now, level, area, peak = LevelSeries(), 0.0, 0.0, 0.0, 0.0
    for passed, to in changes:
        area += passed * level
        now, level = now + passed, to
        series.set(now, to)
        peak = max(peak, to)
    area, end_s = area + rest_s * level, now + rest_s
    means = series.means(end_s)
    lengths = [series.width_s] * len(means)
    if lengths:
        lengths[-1] = end_s - series.width_s * (len(means) - 1)
    got = sum(mean * length for mean, length in zip(means, lengths, strict=True))
    assert got == pytest.approx(area, abs=1e-6 * max(1.0, area))
    assert len(means) <= MAX_BUCKETS
    assert all(mean <= peak * (1 + 1e-9) for mean in means)


def test_buckets_grow_with_time() -> None:
    series = LevelSeries()
    series.set(0.0, 4.0)
    assert series.means(1.0) == [4.0] * 8
    assert series.width_s == FINEST_S
    series.set(FINEST_S * MAX_BUCKETS * 3, 0.0)
    assert series.width_s == 4 * FINEST_S
    assert set(series.means(FINEST_S * MAX_BUCKETS * 3)) == {4.0}


def test_a_peak_is_not_averaged_away() -> None:
    series = LevelSeries()
    series.set(0.01, 9.0)
    series.set(0.02, 1.0)
    assert series.peaks(0.1) == [9.0]
    assert series.means(0.1)[0] < 2.0
