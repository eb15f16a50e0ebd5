"""Which calls a fault strikes."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.fake_instance.engine import KINDS, Fault, Switchboard, parse_fault


def test_a_fault_strikes_as_often_as_it_should() -> None:
    board = Switchboard(seed=3)
    board.set(Fault("reset", probability=0.25))
    struck = sum(board.draw("generate") is not None for _ in range(4000))
    assert 900 < struck < 1100
    assert board.faults["reset"].struck == struck
    again = Switchboard(seed=3)
    again.set(Fault("reset", probability=0.25))
    assert sum(again.draw("generate") is not None for _ in range(4000)) == struck


def test_a_fault_strikes_where_it_should() -> None:
    board = Switchboard()
    board.set(Fault("reset"))
    board.set(Fault("update_500", times=2))
    assert board.draw("control") is None
    assert [board.draw("weights") is not None for _ in range(3)] == [True, True, False]
    board.set(Fault("reset", on="all"))
    for where in ("generate", "weights", "control"):
        fault = board.draw(where)  # type: ignore[arg-type]
        assert fault.fault == "reset"


def test_the_command_line_names_kind_and_probability() -> None:
    assert parse_fault("reset=0.01") == Fault("reset", probability=0.01)
    assert parse_fault("silent") == Fault("silent")
    for bad in ("quake", "reset=2", "reset=x", "=1"):
        with pytest.raises(ValueError, match=KINDS[0]):
            parse_fault(bad)
