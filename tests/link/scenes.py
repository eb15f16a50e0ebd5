"""Runs coroutine functions as tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def runs(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs a coroutine function and takes the same fixtures."""

    @functools.wraps(scene)
    def test(*given: Any, **named: Any) -> None:
        asyncio.run(scene(*given, **named))

    return test
