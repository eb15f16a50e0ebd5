"""A journal as a page."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.timeline import journal_page
from tests.inspection.journals import recorded
from tests.page.test_run_page import data_of


def test_a_page(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(path, "areal")
    data = data_of(journal_page(Recording(path)))
    [policy] = data["policies"]
    assert (data["title"], policy["name"]) == ("j.jsonl", "areal")
    assert sum(policy["staleness"].values()) == 48
    assert len(policy["record"]["curves"]) == len(policy["steps"]) == run.summary.steps
    assert sum(policy["record"]["spans"]["tokens"]) == sum(s.generated_tokens for s in run.steps)
    assert data["offered"] == []
    assert ("batches", [str(run.summary.steps)]) in [
        (row["name"], row["cells"]) for row in data["tables"][0]["rows"]
    ]
