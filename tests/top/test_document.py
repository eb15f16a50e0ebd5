"""Fields that are not shown are no reason not to read."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.top.screen import Document
from tests.top.made_up import said


def test_what_is_new_is_left_out() -> None:
    assert msgspec.convert(said(series=[1, 2]), Document).batches == 128


def test_another_schema_is_not_read() -> None:
    with pytest.raises(msgspec.ValidationError, match="schema"):
        msgspec.convert(said(schema="another/1"), Document)
