"""Hypothesis: no deadlines, for machines are noisy; in CI the same examples every time.
A collector that passes over what lives as long as the tests. And coroutine functions as tests."""

from __future__ import annotations

import gc
import inspect
import os

import pytest
from hypothesis import settings

from tests import virtual_net

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish() -> None:
    """Modules and collected tests are most of the memory: no collection walks through them."""
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def test_` runs in virtual time, its sockets in memory."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    virtual_net.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
