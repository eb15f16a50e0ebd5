"""The figures of a whole run."""

from __future__ import annotations

from tests.metrics.tape import Tape


def test_asking_twice_changes_nothing() -> None:
    tape = Tape(places=4)
    tape.join("i", "j")
    tape.start(1.0, ("a/0", "i"))
    tape.finish(3.0, "a/0", 1, 5)
    assert tape.metrics.summary(9.0) == tape.metrics.summary(9.0)


def test_what_follows_the_last_event_is_waited_at_the_barrier() -> None:
    tape = Tape(places=4)
    tape.join("i")
    tape.start(0.0, ("a/0", "i"))
    tape.finish(3.0, "a/0", 1, 5)
    assert tape.idle(12.0)["barrier"] == 9 / 12
