"""The table of events: nothing that may happen is left out, nothing else is in it."""

from __future__ import annotations

import typing

from rollout_sched.core.model.events import Event
from tests.core.told import make_scheduler


def test_every_event_has_its_handler() -> None:
    assert set(make_scheduler()._apply) == set(typing.get_args(Event))
