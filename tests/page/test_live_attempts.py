"""The attempts of a live run."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import InstanceJoined, RequestFinished, Woke
from rollout_sched.metrics.fold import Folded
from rollout_sched.page import live_page as live_attempts
from rollout_sched.page.live_page import LiveAttempts


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_attempts, "ENDED", 3)
    attempts = LiveAttempts()
    folded = Folded(*attempts.folds)
    folded.observe(0.0, InstanceJoined("i", 4, 1000), [])
    for number in range(9):
        name = f"d{number}"
        folded.observe(1.0, Woke(), [Dispatch(name, number, "i", 10, 40, 0)])
        folded.observe(2.0, RequestFinished(name, number, 5), [])
    assert [each.group for each in attempts.since(0)] == ["d6", "d7", "d8"]
    assert [each.index for each in attempts.since(0)] == [-1, -1, -1]
    assert attempts.serial == 18
    assert attempts.since(17) == attempts.since(0)[-1:]
