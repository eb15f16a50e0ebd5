"""What several test modules share: small views for policies, tiny worlds, and watched runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, load_policy, parse_policy
from rollout_sched.core.model.actions import Action, Deliver, Dispatch
from rollout_sched.core.model.events import Event
from rollout_sched.core.model.model import (
    DeliveredSample,
    Group,
    Instance,
    InstanceStatus,
    Request,
    RequestState,
    Siblings,
)
from rollout_sched.core.model.records import DeliveredGroup, Launch
from rollout_sched.core.model.roles import (
    Capacity,
    FleetView,
    Lending,
    Migrant,
    Migration,
    Progress,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.waiting import Shares
from rollout_sched.simulators import traces
from rollout_sched.simulators.instance.model import CostModel, Speculation
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.faults import Fault
from rollout_sched.simulators.replay.links import TransferCost
from rollout_sched.simulators.replay.scenario import (
    FleetModel,
    Job,
    RewardModel,
    Scenario,
    TrafficModel,
    TrainerModel,
    Visibility,
)
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace, Turn, gather

# -- nouns of the core ---------------------------------------------------------------------------


def fields_of(noun: object) -> dict[str, Any]:
    """All that it holds; where it is compiled, what it derives from that besides."""
    members = vars(type(noun)).items()
    kinds = MemberDescriptorType, GetSetDescriptorType
    return {name: getattr(noun, name) for name, member in members if isinstance(member, kinds)}


# -- views for policies ------------------------------------------------------------------------


CAPACITY = Capacity(instances=4, slots=1024, kv_tokens=2_000_000)


@dataclass
class ProgressView:
    """The attributes of the Progress protocol, to be set at will."""

    prompts_per_step: int = 4
    version: int = 0
    fleet_version: int = 0
    trainer_waiting: bool = True
    closed: bool = False
    fresh: int = 0
    deferred: int = 0
    active: int = 0
    spent: int = 0
    judging: int = 0
    complete: int = 0
    lost: int = 0
    delivered: int = 0
    started: int = 0
    in_batch: int = 0
    round: Launch | None = None
    update_pending: bool = False
    updating: int = 0
    recent: Sequence[DeliveredGroup] = ()
    capacity: Capacity = CAPACITY

    @property
    def missing(self) -> int:
        left = self.complete + self.judging + self.active + self.spent + self.deferred + self.fresh
        places = self.open_places
        return min(places, left) if self.closed else places

    @property
    def in_progress(self) -> int:
        return self.in_batch + self.complete + self.judging + self.active

    @property
    def open_places(self) -> int:
        return self.prompts_per_step - self.in_batch


def make_group(
    finished: Sequence[int] = (), running: Sequence[int] = (), *, max_tokens: int = 1000
) -> Group:
    """A group whose members have finished with, or made so far, these response tokens."""
    group = Group("g", 0, len(finished) + len(running), Siblings("g", 10, max_tokens))
    for index, tokens in enumerate([*finished, *running]):
        request = Request(f"g/{index}", group.siblings, group, index, index, 10 + tokens)
        request.response_tokens = tokens
        if index < len(finished):
            request.state, request.finish = RequestState.FINISHED, "stop"
            group.finished.append(request)
        group.requests.append(request)
    group.siblings.lengths = sorted(finished)
    return group


def make_request(*, context: int = 100, last_instance: str | None = None, made: int = 0) -> Request:
    group = Group("g", 0, 1, Siblings("g", context, 1000))
    request = Request("g/0", group.siblings, group, 0, 0, context)
    request.last_instance = last_instance
    request.response_tokens = made
    return request


class Loads:
    """A fleet of open instances that routing may look at; `send` puts work on one."""

    def __init__(self, routing: Any, instances: int, *, slots: int = 100) -> None:
        self.fleet = Fleet(
            routing.load, lambda instance: instance.in_flight < instance.slots, Shares()
        )
        self._names = [f"i{number}" for number in range(instances)]
        for name in self._names:
            self.fleet.join(name, slots, 10**6, 0)

    def __getitem__(self, number: int) -> Instance:
        return self.fleet.instances[self._names[number]]

    def send(self, number: int, requests: int = 1, *, context: int = 100) -> None:
        for _ in range(requests):
            self.fleet.send(make_request(context=context), self[number], 1000)


class Restless(Migration, msgspec.Struct, frozen=True):
    """A migration without sense: what runs goes to the next open instance, three times each."""

    interval_s: float = 0.0

    def choose(self, fleet: FleetView) -> list[Migrant]:
        return [
            Migrant(attempt, to)
            for instance, to in zip(fleet.open, [*fleet.open[1:], *fleet.open[:1]], strict=True)
            if instance is not to and instance.version == to.version
            for attempt in instance.attempts.values()
            if attempt.request.state is RequestState.RUNNING
            and not attempt.abandoned
            and attempt.request.migrations < 3
        ]


class Generous(Lending, msgspec.Struct, frozen=True):
    """A lending without sense: all but one make way at the first occasion."""

    def choose(self, fleet: FleetView, progress: Progress) -> list[Instance]:
        serving = [
            instance
            for instance in fleet.instances.values()
            if instance.status is InstanceStatus.SERVING and not instance.leaving
        ]
        return serving[1:]


# -- tiny worlds -------------------------------------------------------------------------------


def make_trace(lengths: Mapping[str, Sequence[int]], *, prompt: int = 4, name: str = "t") -> Trace:
    """A single-turn trace: group -> response lengths."""
    samples = [
        traces.SampleRecord(group, index, prompt, (Turn(length),))
        for group, members in lengths.items()
        for index, length in enumerate(members)
    ]
    return Trace(name, gather(samples))


def make_scenario(
    *,
    instances: int = 1,
    slots: int = 8,
    kv_tokens: int = 10_000,
    train_s: float = 10.0,
    update_s: float = 2.0,
    colocated: bool = False,
    keeps_kv: bool = False,
    poll_s: float = 0.0,
    stream_s: float = 0.0,
    prompts_per_step: int = 1,
    samples: int = 0,
    max_tokens: int = 0,
    batches: bool = True,
    epochs: int = 1,
    known: int = 0,
    traffic: TrafficModel | None = None,
    rewards: RewardModel | None = None,
    faults: Sequence[Fault] = (),
    speculation: Speculation | None = None,
) -> Scenario:
    """Every engine step takes one second, every training step and update a constant time. A sample
    that starts over gets its length again."""
    return Scenario(
        name="tiny",
        fleet=FleetModel(instances, kv_tokens, block_size=1, max_num_seqs=slots),
        cost=CostModel(step_s=1.0, weights_s=0.0, token_s=0.0),
        trainer=TrainerModel(
            placement="colocated" if colocated else "disaggregated",
            fixed_s=train_s,
            seconds_per_token=0.0,
            keeps_kv=keeps_kv,
        ),
        weights=TransferCost(fixed_s=update_s),
        visibility=Visibility(poll_s=poll_s, stream_s=stream_s),
        job=Job(prompts_per_step, samples, max_tokens, batches, epochs, known, redraws=False),
        traffic=traffic,
        rewards=rewards,
        faults=tuple(faults),
        speculation=speculation,
    )


def make_policy(name: str = "made", **roles: Any) -> PolicyFile:
    """A policy from role tables; a bare string stands for its `use`."""
    tables = {role: {"use": of} if isinstance(of, str) else of for role, of in roles.items()}
    return parse_policy(name, tables)


# -- watched runs ------------------------------------------------------------------------------


@dataclass
class Watched:
    """A closed loop that has run: the seconds it took and all that was said in it."""

    loop: ClosedLoop
    total_s: float = 0.0
    log: list[tuple[float, Event, list[Action]]] = field(default_factory=list)

    @property
    def scheduler(self) -> Scheduler:
        """The last, where it restarts."""
        return self.loop.scheduler

    @property
    def kinds(self) -> set[type[Any]]:
        """Of the events."""
        return {type(event) for _, event, _ in self.log}

    def said(self, kind: type[Any]) -> list[tuple[float, Any]]:
        """Every event or action of one kind, with its time."""
        return [
            (now, word)
            for now, event, actions in self.log
            for word in (event, *actions)
            if isinstance(word, kind)
        ]

    @property
    def deliveries(self) -> list[tuple[float, list[str]]]:
        """When each batch was delivered, and its groups."""
        return [
            (now, list(dict.fromkeys(sample.group for sample in batch.samples)))
            for now, batch in self.said(Deliver)
        ]

    @property
    def dispatches(self) -> list[tuple[float, str]]:
        return [(now, action.request) for now, action in self.said(Dispatch)]

    @property
    def samples(self) -> list[DeliveredSample]:
        return [sample for _, batch in self.said(Deliver) for sample in batch.samples]


def watch(
    policy: PolicyFile | str,
    trace: Trace,
    scenario: Scenario,
    *,
    seed: int = 0,
    check: bool = True,
) -> Watched:
    """Run the closed loop with every word noted, and the invariants checked after each."""
    if isinstance(policy, str):
        policy = load_policy(policy)
    workload = Workload(trace, scenario.job, seed=seed, traffic=scenario.traffic)

    def make_scheduler() -> Scheduler:
        return policy.scheduler(workload.prompts_per_step, seed=seed, lengths=workload.length)

    log: list[tuple[float, Event, list[Action]]] = []

    def note(now: float, event: Event, actions: list[Action]) -> None:
        log.append((now, event, list(actions)))
        if check:
            loop.scheduler.check_invariants()

    loop = ClosedLoop(make_scheduler(), workload, scenario, [note], successor=make_scheduler)
    return Watched(loop, loop.run(), log)


def loaded_by(statements: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the statements."""
    code = f"import sys\n{statements}\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(shown.stdout.splitlines()[-1].split())
