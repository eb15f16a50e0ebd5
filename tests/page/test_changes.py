"""What changed last."""

from __future__ import annotations

from rollout_sched.core.model.events import InstanceJoined, InstanceLost, RequestFailed, Retuned
from rollout_sched.metrics.fold import Folded
from rollout_sched.page.live_page import CHANGES, ChangeLog


def test_each_has_its_level_and_is_in_words() -> None:
    changes = ChangeLog()
    folded = Folded(changes)
    folded.observe(1.0, InstanceJoined("i", 4, 1000, 7), [])
    folded.observe(2.0, RequestFailed("a", 1, "500"), [])
    folded.observe(3.0, InstanceLost("i", "gone"), [])
    folded.observe(4.0, InstanceLost("j", "drained", asked=True), [])
    folded.observe(5.0, Retuned({"freshness": {"max_staleness": 2}}), [])
    assert [change[1:] for change in changes.last] == [
        ("info", "joined", "i joined with version 7"),
        ("warning", "failed", "an attempt of a failed: 500"),
        ("error", "lost", "i was lost: gone"),
        ("info", "left", "j was drained"),
        ("info", "retuned", "policy parameters changed: freshness.max_staleness = 2"),
    ]


def test_only_the_last_are_kept() -> None:
    changes = ChangeLog()
    folded = Folded(changes)
    for number in range(2 * CHANGES):
        folded.observe(float(number), InstanceLost("i"), [])
    assert [change.at for change in changes.last] == [float(n) for n in range(CHANGES, 2 * CHANGES)]
