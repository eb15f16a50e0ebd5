"""Hypothesis: no deadlines, for machines are noisy; in CI the same examples every time.
And a collector that passes over what lives as long as the tests."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish() -> None:
    """Modules and collected tests are most of the memory: no collection walks through them."""
    gc.collect()
    gc.freeze()
