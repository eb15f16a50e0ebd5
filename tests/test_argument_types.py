"""Types of arguments: what they take, and what they say of what they do not."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from rollout_sched.flags import natural, number, positive, seconds, share


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (natural, "0", 0),
        (natural, "7", 7),
        (positive, "1", 1),
        (number, "-1.5", -1.5),
        (share, "0", 0.0),
        (share, "1", 1.0),
        (seconds, "0.5", 0.5),
    ],
)
def test_taken(kind: Callable[[str], float], text: str, value: float) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (natural, "-1"),
        (natural, "1.5"),
        (positive, "0"),
        (positive, "many"),
        (number, "nan"),
        (number, "inf"),
        (number, "ten"),
        (share, "1.01"),
        (share, "-0.1"),
        (seconds, "0"),
        (seconds, "-3"),
    ],
)
def test_refused_by_name(kind: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        kind(text)
