"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def runs(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test of a coroutine function, which takes fixtures as it does."""

    @functools.wraps(scene)
    def test(*given: Any, **named: Any) -> None:
        asyncio.run(scene(*given, **named))

    return test
