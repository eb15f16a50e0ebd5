"""Journals of small replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.config import load_policy
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.replay.scenario import Job, load_scenario
from rollout_sched.simulators.traces import Trace


def recorded(
    path: Path,
    policy: str,
    trace: str = "tau_airline",
    groups: int = 12,
    *,
    allow_code: bool = False,
    **changes: Any,
) -> tuple[Trace, Run]:
    """A journal of that policy in the scenario of the smallest fleet, changed so; the trace that
    was replayed."""
    offered = traces.read(trace).head(groups)
    scenario = load_scenario("qwen7b-8xh100-disaggregated")
    job = Job(prompts_per_step=4, redraws=False)
    scenario = msgspec.structs.replace(scenario, **{"job": job, **changes})
    loaded = load_policy(policy, allow_code=allow_code)
    return offered, run_policy(loaded, offered, scenario, journal_path=path)
