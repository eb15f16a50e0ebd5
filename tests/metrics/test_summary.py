"""The figures of a whole run."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import events as ev
from tests.metrics.tape import Tape, deliver, sample


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


@pytest.mark.parametrize(("trained", "counted"), [(50, 50), (100, 100), (200, 100)])
def test_tokens_beyond_those_asked_for_do_not_count(trained: int, counted: int) -> None:
    tape = Tape(offered=lambda group: [100])
    tape.at(0.0, ev.BatchRequested(), deliver(sample("a/0", trained)))
    summary = tape.metrics.summary(10.0)
    assert summary.accepted_tokens_per_s == trained / 10
    assert summary.equal_length_tokens_per_s == counted / 10


def test_without_steps_no_time_is_anybody_s() -> None:
    summary = Tape().metrics.summary(10.0)
    assert (summary.first_step_s, summary.steady_s, summary.drain_s) == (0.0, 0.0, 0.0)
