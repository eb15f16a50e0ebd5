"""Hypothesis: no deadlines, for machines are noisy; in CI the same examples every time.
Coroutine functions as tests. And memory that test processes give back."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
from hypothesis import settings

from tests import virtual_loop, virtual_net

#: Seconds that a coroutine test in real time may take.
LIMIT_S = 300.0

#: Growth of a test process, in bytes, after which it collects garbage: the collector by itself
#: counts objects, of which a few may hold most of the memory.
GROWTH = 64 * 2**20

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time(limit_s): a coroutine test with a real clock")
    config.pluginmanager.register(_Collector())


@pytest.fixture
def files_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time nobody waits for a disk, or for a thread."""

    def run_in_executor(loop: Any, executor: Any, call: Any, *arguments: Any) -> Any:
        done = loop.create_future()
        done.set_result(call(*arguments))
        return done

    monkeypatch.setattr(virtual_loop.VirtualLoop, "run_in_executor", run_in_executor)


class _Collector:
    """Collects the garbage of tests once their process has grown."""

    def __init__(self) -> None:
        self._least = _resident()

    def pytest_runtest_logfinish(self) -> None:
        if _resident() > self._least + GROWTH:
            gc.collect()
            self._least = _resident()


def _resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def test_` runs in virtual time, its sockets in memory; marked `real_time`, on
    asyncio's own loop. Fixtures that are asynchronous context managers are entered in its loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = _entered(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names})
    if mark := pyfuncitem.get_closest_marker("real_time"):
        asyncio.run(asyncio.wait_for(test, mark.args[0] if mark.args else LIMIT_S))
    else:
        virtual_net.run(test)
    return True


async def _entered(test: Callable[..., Awaitable[None]], arguments: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        for name, value in arguments.items():
            if isinstance(value, AbstractAsyncContextManager):
                arguments[name] = await stack.enter_async_context(value)
        await test(**arguments)
