"""Simulated instances in virtual time, whose constants a calibration is to find again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_sched.calibration.calibration import Calibration, Calibrator
from rollout_sched.integrations.vllm import EngineLimits
from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec
from tests import virtual_loop

T = TypeVar("T")

COST = CostModel(
    step_s=1.5e-3,
    weights_s=4.0e-3,
    token_s=20e-6,
    sequence_s=45e-6,
    context_s=0.2e-6,
    attention_s=10e-9,
    request_s=0.7e-3,
    prefill_s=0.9e-3,
)
SPEC = InstanceSpec(
    cost=COST,
    kv_blocks=4096,
    block_size=16,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len=16384,
)
LIMITS = EngineLimits(16, True, 2048, "0.32.0")


def instance(spec: InstanceSpec = SPEC, name: str = "fake") -> RealtimeInstance:
    def length(order: Order, response: Any) -> int:
        return spec.max_model_len if order.sampling.get("ignore_eos") else 3

    return RealtimeInstance(name, spec, length)


def calibrator(
    *servers: RealtimeInstance, limits: EngineLimits = LIMITS, seed: int = 1, **other: Any
) -> Calibrator:
    return Calibrator(servers, limits, seed=seed, report=lambda *_: None, **other)


def in_virtual_time(scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return virtual_loop.run(scene())


def calibrated(
    spec: InstanceSpec = SPEC, seconds: float = 120.0, limits: EngineLimits = LIMITS
) -> Calibration:
    async def scene() -> Calibration:
        return await calibrator(instance(spec), limits=limits).run(seconds)

    return in_virtual_time(scene)
