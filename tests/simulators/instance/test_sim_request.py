"""How a simulated instance may be paused."""

from __future__ import annotations

import pytest

from tests.simulators.instance.by_hand import instance


def test_an_unknown_pause_mode_is_refused() -> None:
    one = instance()
    with pytest.raises(ValueError, match="keep, abort or wait, got 'drain'"):
        one.pause(0.0, "drain", clear_cache=False)  # type: ignore[arg-type]
