"""Outages: who was lost, who left, who came back, and how long they were away."""

from __future__ import annotations

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Discard
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.outages import OutageFigures, OutageFold


def figures(total_s: float, *entries: tuple[float, ev.Event, list[object]]) -> OutageFigures:
    fold = OutageFold()
    folded = Folded(fold)
    for now, event, actions in entries:
        folded.observe(now, event, actions)  # type: ignore[arg-type]
    return fold.figures(total_s)


def joined(now: float, name: str = "a") -> tuple[float, ev.Event, list[object]]:
    return now, ev.InstanceJoined(name, 8, 1000), []


def lost(now: float, name: str = "a") -> tuple[float, ev.Event, list[object]]:
    return now, ev.InstanceLost(name), []


def test_a_quiet_run_has_none() -> None:
    assert figures(99.0, joined(0.0), joined(0.0, "b")) == OutageFigures(0, 0, 0, 0.0, 0, 0)


def test_lost_and_back() -> None:
    of = figures(100.0, joined(0.0), lost(10.0), joined(30.0), lost(90.0))
    assert (of.instances_lost, of.instances_returned) == (2, 1)
    assert of.away_s == 20.0 + 10.0


def test_who_was_let_go_has_left() -> None:
    removed = (5.0, ev.InstanceLost("a", asked=True), [])
    of = figures(100.0, joined(0.0), removed, joined(50.0), lost(60.0))
    assert (of.instances_left, of.instances_lost) == (1, 1)
    assert of.away_s == 45.0 + 40.0


def test_a_restart_that_nobody_noticed() -> None:
    of = figures(100.0, joined(0.0), joined(40.0))
    assert (of.instances_lost, of.instances_returned, of.away_s) == (1, 1, 0.0)


def test_one_nobody_knows_is_not_lost() -> None:
    assert figures(100.0, lost(5.0)).instances_lost == 0


def test_failures() -> None:
    failing = [Discard(f"g/{n}", 0, "failed", True, group="g", index=n) for n in range(3)]
    client = [Discard("direct.1", 0, "failed", True)]
    of = figures(
        9.0,
        (1.0, ev.RequestFailed("g/0", 1), []),
        (2.0, ev.RequestFailed("g/0", 2), list(failing)),
        (3.0, ev.RequestFailed("direct.1", 3), list(client)),
    )
    assert (of.failed_attempts, of.failed_prompts) == (3, 1)


def test_a_scheduler_that_restarts_takes_no_instance_away() -> None:
    restored = (10.0, ev.Restored(RunState()), [])
    of = figures(50.0, joined(0.0), joined(0.0, "b"), restored, joined(10.0), joined(10.0, "b"))
    assert (of.scheduler_restarts, of.instances_lost, of.instances_returned) == (1, 0, 0)
    assert of.away_s == 0.0
