"""The fields of a gateway's live state (`GET /admin/live`) that the terminal shows."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "rollout-sched-live/1"


class RequestCounts(msgspec.Struct, frozen=True):
    in_flight: int
    waiting: int
    parked: int


class WaitsFor(msgspec.Struct, frozen=True):
    """What the next batch and the newest weights wait for; "" if nothing is missing."""

    batch: str
    weights: str


class InstanceLine(msgspec.Struct, frozen=True):
    """One instance. A field is None if the instance does not report it or is away."""

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
    """The current step. number: batches before it; finished: samples that ended in it; in_batch:
    groups of its batch that are delivered; complete: further groups that are complete."""

    number: int
    elapsed_s: float
    finished: int
    in_batch: int
    complete: int


class PastStep(msgspec.Struct, frozen=True):
    """A past step; fields as in `metrics.step.Step`."""

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
    """`at`: seconds on the scheduler's clock."""

    at: float
    level: Literal["info", "warning", "error"]
    text: str


class Document(msgspec.Struct, frozen=True):
    """`now`: seconds on the scheduler's clock; `watched_s`: seconds since which steps, staleness,
    waste and changes have been gathered."""

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
