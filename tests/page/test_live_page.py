"""The live page holds nothing until somebody signs in."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.actions import Discard, Dispatch
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    WeightsPublished,
    Woke,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.metrics import Step
from rollout_sched.metrics.attempts import OUTCOMES
from rollout_sched.metrics.fold import Folded
from rollout_sched.page import live_page as live_attempts
from rollout_sched.page.live_page import (
    CHANGES,
    ChangeLog,
    LiveAttempts,
    LiveFold,
    last_steps,
    live_page,
)
from tests.helpers import make_policy
from tests.page.test_run_page import data_of


def test_page_has_text_and_no_data() -> None:
    page = live_page()
    assert set(data_of(page)) == {"words"}
    assert b"connect-src 'self'" in page


def test_the_key_is_never_in_an_address() -> None:
    page = live_page().decode()
    assert "localStorage" not in page
    assert "EventSource" not in page.replace("because EventSource cannot", "")
    assert "Authorization: `Bearer ${key}`" in page


class Run:
    """A scheduler, and who looks at it once `look` was called."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = make_policy("p").scheduler(1)
        self.now = 0.0
        self.fold: LiveFold | None = None
        self.sent: list[Dispatch] = []

    def tell(self, event: Any, after_s: float = 1.0) -> None:
        self.now += after_s
        actions = self.scheduler.handle(event, self.now)
        self.sent += [action for action in actions if isinstance(action, Dispatch)]
        if self.fold is not None:
            self.fold.observe(self.now, event, actions)

    def begin(self, groups: int = 2) -> None:
        for name in ("i", "j"):
            self.tell(InstanceJoined(name, 4, 10_000))
        self.tell(BatchRequested())
        for number in range(groups):
            self.tell(GroupSubmitted(f"g{number}", 2, 10, 50))

    def look(self) -> LiveFold:
        self.fold = LiveFold(self.scheduler.view, self.now)
        return self.fold

    def finish(self, number: int) -> None:
        sent = self.sent[number]
        self.tell(RequestFinished(sent.request, sent.attempt, 20))


def test_first_look_includes_requests_in_flight() -> None:
    run = Run()
    run.begin(1)
    fold = run.look()
    known = fold.attempts.since(0)
    assert {attempt.attempt for attempt in known} == {sent.attempt for sent in run.sent}
    assert {attempt.start for attempt in known} == {run.now}
    assert not fold.changes.last, "nothing has changed yet"


def test_later_looks_hold_only_changes() -> None:
    run = Run()
    run.begin(1)
    fold = run.look()
    seen = fold.attempts.serial
    assert fold.attempts.since(seen) == []
    run.finish(0)
    [ended, *_] = fold.attempts.since(seen)
    assert (ended.attempt, OUTCOMES[ended.outcome]) == (run.sent[0].attempt, "finished")
    [span] = ended.spans
    assert (span.start_s, span.length_s, span.tokens) == (run.now - 1, 1.0, 20)
    assert fold.finished == 1


def test_ended_step_is_reported() -> None:
    run = Run()
    run.begin(1)
    fold = run.look()
    run.finish(0)
    run.finish(1)
    assert (fold.step_began_s, fold.finished) == (run.now, 0)
    assert fold.staleness == {0: 2}
    assert [change.kind for change in fold.changes.last] == ["delivered"]
    run.tell(WeightsPublished(1))
    assert "published" in {change.kind for change in fold.changes.last}


def test_failures_are_listed_with_their_level() -> None:
    run = Run()
    run.begin(1)
    fold = run.look()
    sent = run.sent[0]
    run.tell(RequestFailed(sent.request, sent.attempt, "500"))
    run.tell(InstanceLost(run.sent[1].instance, "gone"))
    said = {(change.level, change.kind) for change in fold.changes.last}
    assert said >= {("warning", "failed"), ("error", "lost")}
    assert any("gone" in change.text for change in fold.changes.last)


def test_waste_by_cause() -> None:
    fold = LiveFold(Run().scheduler.view, 0.0)
    fold.observe(1.0, Woke(), [Discard("a", 30, "stale"), Discard("b", 5, "stale")])
    assert fold.waste == {"stale": 35}


def test_ended_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_each_change_has_a_level_and_a_text() -> None:
    changes = ChangeLog()
    folded = Folded(changes)
    folded.observe(1.0, InstanceJoined("i", 4, 1000, 7), [])
    folded.observe(2.0, RequestFailed("a", 1, "500"), [])
    folded.observe(3.0, InstanceLost("i", "gone"), [])
    folded.observe(4.0, InstanceLost("j", "drained", requested=True), [])
    assert [change[1:] for change in changes.last] == [
        ("info", "joined", "i joined with version 7"),
        ("warning", "failed", "an attempt of a failed: 500"),
        ("error", "lost", "i was lost: gone"),
        ("info", "left", "j was drained"),
    ]


def test_only_the_last_changes_are_kept() -> None:
    changes = ChangeLog()
    folded = Folded(changes)
    for number in range(2 * CHANGES):
        folded.observe(float(number), InstanceLost("i"), [])
    assert [change.at for change in changes.last] == [float(n) for n in range(CHANGES, 2 * CHANGES)]


def test_a_step_seen_in_part_has_no_tail() -> None:
    whole, partial = (Step(n, 0.0, t50_s=1.0, t99_s=2.0, partial=n == 1) for n in range(2))
    told = last_steps([whole, partial])
    assert [(step["t50_s"], step["t99_s"]) for step in told] == [(1.0, 2.0), (None, None)]
