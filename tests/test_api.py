"""The public API is this page; a change to it is a decision."""

from __future__ import annotations

import pytest

import rollout_sched
from tests.helpers import loaded_by


def test_the_public_names_are_pinned():
    assert rollout_sched.__all__ == [
        "Applied",
        "Batch",
        "BlockingRollouts",
        "CallerError",
        "Prompt",
        "Reload",
        "RolloutError",
        "RolloutScheduler",
        "Sample",
        "Scheduler",
        "Trajectory",
        "Transfer",
        "__version__",
        "actions",
        "events",
        "load_policy",
    ]
    assert all(hasattr(rollout_sched, name) for name in rollout_sched.__all__)


def test_all_public_names_are_listed_and_no_others_found():
    assert set(rollout_sched.__all__) <= set(dir(rollout_sched))
    with pytest.raises(AttributeError, match="has no attribute 'Promt'"):
        _ = rollout_sched.Promt


def test_the_core_runs_from_the_public_names_alone():
    scheduler = rollout_sched.load_policy("round_robin_sync").scheduler(prompts_per_step=1)
    events = rollout_sched.events
    scheduler.handle(events.InstanceJoined("a", slots=4, kv_tokens=1000), 0.0)
    scheduler.handle(events.GroupSubmitted("g", 1, 10, 20), 0.0)
    (dispatch,) = scheduler.handle(events.BatchRequested(), 0.0)
    assert isinstance(dispatch, rollout_sched.actions.Dispatch)
    answer = events.RequestFinished(dispatch.request, dispatch.attempt, 7)
    (deliver,) = scheduler.handle(answer, 1.0)
    assert deliver.samples[0].response_tokens == 7


def test_importing_the_package_imports_nothing_else_of_it():
    assert {m for m in loaded_by("import rollout_sched") if m.startswith("rollout_sched")} == {
        "rollout_sched"
    }


def test_the_core_and_the_client_need_no_simulator_and_no_heavy_library():
    core = loaded_by("from rollout_sched import Scheduler, actions, events, load_policy")
    assert not core & {"aiohttp", "numpy", "rich", "rollout_sched.live", "rollout_sched.simulators"}
    client = loaded_by("from rollout_sched import Prompt, RolloutScheduler")
    assert not client & {"ray", "rich", "rollout_sched.simulators", "torch", "vllm"}
