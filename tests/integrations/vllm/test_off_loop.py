"""Work off the loop: its result, its error, its limit, and nobody who waits for what hangs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollout_sched.integrations.vllm.control import off_loop


def test_what_it_returns_and_what_it_raises():
    def fail():
        raise KeyError("x")

    assert asyncio.run(off_loop(threading.get_ident, 5.0)) != threading.get_ident()
    with pytest.raises(KeyError):
        asyncio.run(off_loop(fail, 5.0))


def test_what_hangs_is_given_up_and_holds_up_no_end():
    hanging = threading.Event()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(off_loop(lambda: hanging.wait(20), 0.05))
    assert time.monotonic() - begun < 5
    hanging.set()  # it answers into a loop that is closed, which does no harm
    time.sleep(0.05)
