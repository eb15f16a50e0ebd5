"""Sessions: the last home is known, and memory is bounded."""

from __future__ import annotations

from rollout_sched.core.model.model import Sessions


def test_the_last_home_counts() -> None:
    sessions = Sessions()
    assert sessions.last_instance("a") is None
    sessions.sent("a", "i0")
    sessions.sent("a", "i1")
    assert sessions.last_instance("a") == "i1"


def test_an_ended_session_is_forgotten() -> None:
    sessions = Sessions()
    sessions.sent("a", "i0")
    assert sessions.end("a")
    assert not sessions.end("a")
    assert sessions.last_instance("a") is None


def test_the_longest_unused_is_forgotten_first() -> None:
    sessions = Sessions(limit=2)
    sessions.sent("a", "i0")
    sessions.sent("b", "i0")
    sessions.sent("a", "i0")
    sessions.sent("c", "i0")
    assert len(sessions) == 2
    assert sessions.last_instance("b") is None
    assert sessions.last_instance("a") == "i0"


def test_moves_are_counted() -> None:
    sessions = Sessions()
    for instance in ("i0", "i0", "i1", "i0"):
        sessions.sent("a", instance)
    sessions.sent("b", "i1")
    assert sessions.moves == 2
