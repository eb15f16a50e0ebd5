"""Small and large runs by hand, as a page draws them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceReported,
    RequestFinished,
    Woke,
)
from rollout_sched.page.run_page import DrawnRun, RunFold, RunRecord, quantiles, run_page


def folded(entries: Iterable[tuple[float, Any]], end_s: float = 10.0) -> RunRecord:
    """Of events and dispatches, each with its time."""
    fold = RunFold()
    for now, said in entries:
        acted = isinstance(said, Dispatch)
        fold.observe(now, Woke() if acted else said, [said] if acted else [])
    return fold.record(end_s, [[1.0, 2.0, 4.0], [2.0, 3.0, 9.0]])


def small(group: str = "g", instance: str = "i", policy: str = "fcfs") -> DrawnRun:
    """Two requests on one instance, one above the other: the first for all of the ten seconds."""
    record = folded(
        [
            (0.0, InstanceJoined(instance, 2, 1000, 3)),
            (0.0, GroupSubmitted(group, 2, 10, 40)),
            (0.0, Dispatch(f"{group}/0", 1, instance, 10, 40, 3, group=group)),
            (2.0, InstanceReported(instance, 1, 0, 0.5)),
            (4.0, Dispatch(f"{group}/1", 2, instance, 10, 40, 3, group=group, index=1)),
            (8.0, RequestFinished(f"{group}/1", 2, 20)),
            (10.0, RequestFinished(f"{group}/0", 1, 40, ((3, 10), (4, 30)))),
        ]
    )
    return drawn(policy, record)


def drawn(policy: str, record: RunRecord) -> DrawnRun:
    record.lengths = quantiles([20, 40])
    step = {"t50_s": 2.0, "t90_s": 4.0, "t99_s": 4.0}
    idle = {"barrier": 0.2, "queue_empty": 0.1}
    return DrawnRun(policy, record, [step, step], idle, {"barrier": 0.5}, {"0": 30.0, "2": 10.0})


def many(requests: int, instances: int = 8, slots: int = 256) -> DrawnRun:
    """So many requests in groups of eight, each of a length of its own, as places are free."""
    return drawn("many", folded(_many(requests, instances, slots), 0.0))


def _many(requests: int, instances: int, slots: int) -> Iterable[tuple[float, Any]]:
    for number in range(instances):
        yield 0.0, InstanceJoined(f"http://gpu-{number}:8000", slots, 10**6)
    places, now = instances * slots, 0.0
    for number in range(requests + places):
        now += number * 2654435761 % 9973 / 1e6  # no two alike, as in earnest
        if number >= places:
            over = number - places
            version, tokens = over // 4096, 100 + over * 7919 % 9000
            spans = ((version, tokens // 3 + 1), (version + 1, tokens)) if over % 3 else ()
            yield now, RequestFinished(_name(over), over + 1, tokens, spans)
        if number < requests:
            group, index = f"prompt-{number // 8}", number % 8
            instance = f"http://gpu-{number % instances}:8000"
            yield (
                now,
                Dispatch(
                    _name(number), number + 1, instance, 512, 9000, 0, group=group, index=index
                ),
            )


def _name(number: int) -> str:
    return f"prompt-{number // 8}/{number % 8}"


def page_of(*runs: DrawnRun, **said: Any) -> bytes:
    return run_page("a run", runs, offered=quantiles([20, 40, 60]), **said)
