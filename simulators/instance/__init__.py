"""A vLLM instance in virtual time: step scheduler, KV blocks, cost model, event jump."""

from rollout_sched.simulators.instance.cost_fit import EngineSteps, Fit, MeasuredSpan, fit_spans
from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Outcome,
    PauseMode,
    SimRequest,
    Speculation,
    acceptance_giving,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.step_time import StepTime

__all__ = [
    "CostModel",
    "Ended",
    "EngineSteps",
    "Fit",
    "InstanceSpec",
    "MeasuredSpan",
    "Outcome",
    "PauseMode",
    "SimInstance",
    "SimRequest",
    "Speculation",
    "StepTime",
    "acceptance_giving",
    "fit_spans",
]
