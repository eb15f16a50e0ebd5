"""Each fold is shown what it looks at, the event before its actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Wake
from rollout_sched.metrics.fold import Folded, Handler


class Heard:
    def __init__(self, *kinds: type[Any]) -> None:
        self.kinds = kinds
        self.heard: list[tuple[float, Any]] = []

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {kind: lambda now, said: self.heard.append((now, said)) for kind in self.kinds}


def test_folds_hear_what_they_asked_for() -> None:
    one, two = Heard(ev.Woke), Heard(ev.Woke, Wake)
    folded = Folded(one, two)
    folded.observe(1.0, ev.Woke(), [Wake(2.0)])
    folded.observe(2.0, ev.BatchRequested(), [Wake(3.0)])
    assert one.heard == [(1.0, ev.Woke())]
    assert two.heard == [(1.0, ev.Woke()), (1.0, Wake(2.0)), (2.0, Wake(3.0))]
