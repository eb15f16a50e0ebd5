"""Twins: the simulator and the live driver, shown the same world, decide alike.

The closed loop runs a policy in virtual time. The asyncio driver runs the same policy on an event
loop with virtual time, in front of the same simulated instances behind the live port, with a
trainer that takes the same time. Both journals must hold the same events, at the same times, with
the same actions.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rollout_sched.config import parse_policy
from rollout_sched.core.actions import Deliver, Dispatch
from rollout_sched.core.events import BatchRequested, InstanceReported, SubmissionsClosed
from rollout_sched.live.driver import Driver
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.ports import Order, Outcome
from rollout_sched.live.settings import Settings
from rollout_sched.simulators.fake_instance.open_answers import Response
from rollout_sched.simulators.fake_instance.realtime_instance import RealtimeInstance
from rollout_sched.simulators.replay import virtual_loop
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.scenario import Scenario, load_scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Sample, Trace, Turn

PRESETS: dict[str, dict[str, Any]] = {
    "sync": {},
    "tail_batching": {"batching": {"use": "tail_batching"}, "prediction": {"use": "group_history"}},
    "partial_rollout": {
        "batching": {"use": "sync", "over_prompts": 1.5},
        "interruption": {"use": "partial", "at_update": "resubmit"},
        "freshness": {"use": "unbounded"},
    },
    "segments": {
        "interruption": {"use": "partial", "segment_tokens": 37},
        "freshness": {"use": "bounded", "max_staleness": 3},
    },
    "async_in_place": {
        "batching": {"use": "fully_async"},
        "interruption": {"use": "partial", "kv": "retain", "at_update": "in_place"},
        "freshness": {"use": "bounded", "max_staleness": 2},
    },
    "async_resubmit": {
        "batching": {"use": "fully_async"},
        "interruption": {"use": "partial", "kv": "recompute", "at_update": "resubmit"},
        "freshness": {"use": "bounded", "max_staleness": 2},
        "routing": {"use": "least_tokens"},
    },
    "async_rolling": {
        "batching": {"use": "fully_async"},
        "interruption": {"use": "partial", "kv": "retain", "at_update": "in_place"},
        "freshness": {"use": "bounded", "max_staleness": 2},
        "weights": {"use": "rolling"},
    },
    "one_step_off": {
        "batching": {"use": "one_step_off"},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
}


def scenario(instances: int, slots: int) -> Scenario:
    base = load_scenario("qwen7b-8xh100-disaggregated")
    change = msgspec.structs.replace
    return change(
        base,
        fleet=change(
            base.fleet, instances=instances, max_num_seqs=slots, max_num_batched_tokens=512
        ),
        trainer=change(base.trainer, fixed_s=1.7, seconds_per_token=1e-4),
        visibility=change(base.visibility, poll_s=0.0, stream_s=0.0),
        job=change(base.job, prompts_per_step=3),
    )


def trace(groups: list[tuple[int, list[int]]]) -> Trace:
    return Trace(
        "twins",
        {
            f"g{number}": [
                Sample(f"g{number}", index, prompt, (Turn(length),))
                for index, length in enumerate(lengths)
            ]
            for number, (prompt, lengths) in enumerate(groups)
        },
    )


class Payload(TokenPayload):
    """Its answers are as long as the trace says; each try from the start makes another text."""

    def __init__(self, prompt_ids: list[int], length: int) -> None:
        super().__init__(prompt_ids, {"temperature": 1})
        self.length = length

    async def attempt(self, client: Any, dispatch: Dispatch, order_id: str) -> Outcome:
        self.sampling = {"temperature": 1, "length": self.length - dispatch.response_tokens}
        return await super().attempt(client, dispatch, order_id)


def length_of(order: Order, response: Response) -> int:
    length: int = order.sampling["length"]
    return length + response.made_tokens


async def live(policy: Any, workload: Workload, world: Scenario) -> list[Any]:
    """The journal of the live driver."""
    journal: list[Any] = []
    batches: asyncio.Queue[Deliver] = asyncio.Queue()
    driver = Driver(
        policy.scheduler(workload.prompts_per_step, lengths=workload.length),
        settings=Settings(poll_s=1e9, control_timeout_s=1e9, update_timeout_s=1e9),
        observers=[lambda *entry: journal.append(entry)],
        on_deliver=lambda action, payloads: batches.put_nowait(action),
    )
    for number in range(world.fleet.instances):
        name = f"instance-{number}"
        await driver.add_instance(RealtimeInstance(name, world.instance, length_of))
    for number, group in enumerate(workload.prompts):
        tokens = workload.prompt_tokens(group)

        def payload(index: int, number: int = number, group: str = group) -> Payload:
            ids = [number + 1] * workload.prompt_tokens(group)
            return Payload(ids, workload.length(group, index))

        driver.submit_group(
            group, workload.samples_per_prompt, tokens, workload.max_tokens, payload
        )
    driver.tell(SubmissionsClosed())
    driver.tell(BatchRequested())

    async def load(client: Any, version: int) -> None:
        await asyncio.sleep(world.weights.seconds)

    trained = 0
    while True:
        batch = await batches.get()
        tokens = sum(s.prompt_tokens + s.response_tokens for s in batch.samples)
        await asyncio.sleep(world.trainer.step_s(tokens))
        trained += len({sample.group for sample in batch.samples})
        if trained >= len(workload.prompts):
            break
        driver.publish(batch.version + 1, load)
        driver.tell(BatchRequested())
    await driver.close()
    driver.pump.scheduler.check_invariants()
    return journal


def ambiguous(journal: list[Any]) -> bool:
    """Two instances answered at the same time: either may be heard first."""
    where: dict[int, str] = {}
    before: tuple[float, str] = (-1.0, "")
    for at, event, actions in journal:
        where |= {a.attempt: a.instance for a in actions if isinstance(a, Dispatch)}
        instance = where.get(getattr(event, "attempt", 0), "")
        if instance and before[0] == at and before[1] not in ("", instance):
            return True
        before = (at, instance)
    return False


def assert_twins(
    name: str, groups: list[tuple[int, list[int]]], instances: int, slots: int
) -> None:
    policy = parse_policy("twins", PRESETS[name])
    world = scenario(instances, slots)
    recorded = trace(groups)
    simulated: list[Any] = []
    workload = Workload(recorded, world.job)
    scheduler = policy.scheduler(workload.prompts_per_step, lengths=workload.length)
    ClosedLoop(scheduler, workload, world, [lambda *entry: simulated.append(entry)]).run()
    assume(not ambiguous(simulated))
    lived = virtual_loop.run(live(policy, Workload(recorded, world.job), world))
    simulated = [entry for entry in simulated if type(entry[1]) is not InstanceReported]
    for (at, event, actions), (live_at, live_event, live_actions) in zip(
        simulated, lived, strict=False
    ):
        assert (event, actions) == (live_event, live_actions), f"at {at} and {live_at}"
        assert at == pytest.approx(live_at, rel=1e-9, abs=1e-9), event
    assert len(simulated) == len(lived)


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Groups of three; equal ones would end at the same time, in whatever order."""
    number = draw(st.integers(3, 9))
    prompts = draw(st.lists(st.integers(1, 300), min_size=number, max_size=number, unique=True))
    size = 3 * number
    lengths = draw(st.lists(st.integers(1, 160), min_size=size, max_size=size, unique=True))
    return [(prompt, lengths[3 * k : 3 * k + 3]) for k, prompt in enumerate(prompts)]


#: Under async_in_place an instance confirms a pause at the time at which a request finishes there.
PAUSED_AS_ONE_ENDS = [
    (6, [2, 5, 95]),
    (157, [69, 8, 1]),
    (300, [131, 36, 70]),
    (1, [130, 47, 4]),
    (2, [6, 119, 38]),
    (3, [157, 126, 132]),
    (9, [124, 125, 15]),
    (4, [11, 33, 3]),
    (5, [7, 9, 10]),
]


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@example(groups=PAUSED_AS_ONE_ENDS, instances=1, slots=4)
@given(groups=workloads(), instances=st.integers(1, 3), slots=st.integers(1, 8))
def test_twins(name: str, groups: list[tuple[int, list[int]]], instances: int, slots: int) -> None:
    assert_twins(name, groups, instances, slots)
