"""Slow is not stuck."""

from __future__ import annotations

from rollout_sched.integrations.http.connections import Backlog
from tests.integrations.http.wires import Wire


class Slow(Wire):
    unsent = 0

    def get_write_buffer_size(self):
        return self.unsent


def test_a_client_that_reads_a_little_is_slow_and_one_that_reads_nothing_is_stuck():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.begin()
    assert not backlog.shrinks()
    wire.unsent = 99
    assert backlog.shrinks()
    assert not backlog.shrinks()
    wire.unsent = 200  # more was written meanwhile
    assert not backlog.shrinks()
    wire.unsent = 150
    assert backlog.shrinks()


def test_a_client_that_reads_is_neither():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.begin()
    backlog.end()
    wire.unsent = 1
    assert [backlog.throttled, backlog.shrinks()] == [False, False]


def test_a_client_for_whom_too_much_waits_is_cut_off():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.cut()
    assert not wire.closing
    wire.unsent = 101
    backlog.cut()
    assert wire.closing
