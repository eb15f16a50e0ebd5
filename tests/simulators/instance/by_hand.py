"""Instances small enough to foretell every step by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Paused,
    SimRequest,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.reference import ReferenceInstance

Kind = type[SimInstance] | type[ReferenceInstance]
Make = Callable[..., SimInstance | ReferenceInstance]

# Every step takes exactly one second, whatever it does.
SECOND = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0)

H100_7B = CostModel(
    step_s=0.6e-3,
    weights_s=5.95e-3,
    token_s=23.1e-6,
    sequence_s=4.4e-6,
    context_s=26.3e-9,
    attention_s=1.1e-10,
)


def instance(kind: Kind = SimInstance, **settings: Any) -> SimInstance | ReferenceInstance:
    defaults = {"cost": SECOND, "kv_blocks": 1000, "block_size": 4, "max_num_seqs": 8}
    spec = InstanceSpec(**{**defaults, "max_num_batched_tokens": 64, **settings})
    return kind(spec, version=1)


def request(attempt: int, context: int = 10, new: int = 5, **changes: Any) -> SimRequest:
    settings = {"max_new_tokens": 1000, "prompt_stream": "p", "shared_tokens": 0}
    return SimRequest(attempt, context, new, **{**settings, "stream": attempt, **changes})


def follow(one: SimInstance | ReferenceInstance, until: float = math.inf) -> list[Ended | Paused]:
    """Do what a driver does: go from next_at to next_at."""
    said: list[Ended | Paused] = []
    while one.next_at() <= until and one.next_at() < math.inf:
        said += one.advance(one.next_at())
        one.check_invariants()
    if until < math.inf:
        said += one.advance(until)
    return said
