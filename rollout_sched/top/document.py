"""What a gateway says of itself (`GET /admin/live`), as far as a terminal shows it."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "rollout-sched-live/1"


class RequestCounts(msgspec.Struct, frozen=True):
    in_flight: int
    waiting: int
    parked: int


class WaitsFor(msgspec.Struct, frozen=True):
    """What is missing for the next batch, and for the newest weights; "" if it comes by itself."""

    batch: str
    weights: str


class InstanceLine(msgspec.Struct, frozen=True):
    """None is what the instance does not tell, or is away to tell."""

    url: str
    status: str
    reason: str
    version: int | None
    in_flight: int
    slots: int
    waiting: int | None
    kv_usage: float | None
    held: bool = False
    leaving: bool = False


class PresentStep(msgspec.Struct, frozen=True):
    """number: batches before it; finished: samples that have ended in it; in_batch, complete:
    groups that are delivered of it, and that are whole."""

    number: int
    elapsed_s: float
    finished: int
    in_batch: int
    complete: int


class PastStep(msgspec.Struct, frozen=True):
    """As in `metrics.step.Step`."""

    version: int
    rollout_s: float
    t50_s: float
    t90_s: float
    t99_s: float
    trainer_wait_s: float
    samples: int
    tokens: int
    max_staleness: int
    idle_bubble: float


class Change(msgspec.Struct, frozen=True):
    """`at`: of the scheduler's clock, in seconds."""

    at: float
    level: Literal["info", "warning", "error"]
    text: str


class Document(msgspec.Struct, frozen=True):
    """`now`: of the scheduler's clock; `watched_s`: how long steps, staleness, waste and changes
    have been gathered, in seconds."""

    schema: Literal["rollout-sched-live/1"]
    now: float
    watched_s: float
    policy: str
    version: int
    fleet_version: int
    healthy: bool
    broken: str | None
    requests: RequestCounts
    groups: dict[str, int]
    batches: int
    prompts_per_step: int
    trainer_waiting: bool
    waits_for: WaitsFor
    instances: list[InstanceLine]
    step: PresentStep
    steps: list[PastStep]
    staleness: dict[str, int]
    waste: dict[str, int]
    changes: list[Change]
