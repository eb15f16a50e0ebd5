"""Twins: the simulator and the live driver decide the same in the same world.

The closed loop runs a policy in virtual time. The asyncio driver runs the same policy on an event
loop with virtual time, with the same simulated instances behind the live port. Durations of
training, judgements of samples, requests of clients, and faults of instances and attempts are the
same, too. Both journals must have the same events, at the same times, with the same actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from rollout_sched.config import PolicyFile, parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Deliver, Dispatch
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupJudged,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    SessionEnded,
    SubmissionsClosed,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.model import DeliveredSample as Made
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import (
    EnginePaused,
    InstanceError,
    InstanceUnreached,
    Order,
    Outcome,
    PayloadOf,
    RequestRejected,
    RequestTooLong,
    Responder,
)
from rollout_sched.live.requests.token_payload import IN_GROUP, TokenPayload
from rollout_sched.live.settings import Settings
from rollout_sched.simulators.fake_instance.answers import OrderedResponse
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.faults import (
    Failing,
    Failures,
    Fault,
    Joins,
    Leaving,
    Lost,
    ToolsFailing,
    name_of,
)
from rollout_sched.simulators.replay.scenario import (
    Conversation,
    RewardModel,
    Scenario,
    Traffic,
    TrafficModel,
    load_scenario,
)
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn
from tests import virtual_loop

PRESETS: dict[str, dict[str, Any]] = {
    "sync": {},
    "tail_batching": {"batching": {"use": "tail_batching"}, "prediction": {"use": "group_history"}},
    "like_lengths": {
        "batching": {"use": "tail_batching", "over_samples": 1.0},
        "selection": {"use": "like_lengths", "window": 2},
        "prediction": {"use": "prompt_history"},
        "ordering": {"use": "longest_first"},
    },
    "partial_rollout": {
        "batching": {"use": "sync", "over_prompts": 1.5},
        "interruption": {"use": "partial", "at_update": "resubmit"},
        "freshness": {"use": "unbounded"},
    },
    "segments": {
        "interruption": {"use": "partial", "segment_tokens": 37},
        "freshness": {"use": "bounded", "max_staleness": 3},
    },
    "chunks": {
        "interruption": {"use": "partial", "segment_tokens": 37, "segment": "chunk"},
        "freshness": {"use": "bounded", "max_staleness": 3},
        "routing": {"use": "vllm_internal_lb"},
        "admission": {"use": "kv_growth"},
    },
    "async_ahead": {
        "batching": {"use": "fully_async", "max_ahead": 1.5},
        "interruption": {"use": "partial", "at_update": "in_place"},
        "freshness": {"use": "bounded", "max_staleness": 2},
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
    "sync_in_parts": {"batching": {"use": "sync", "over_prompts": 1.5, "part_prompts": 1}},
    "partial_rollout_in_parts": {
        "batching": {"use": "sync", "over_prompts": 1.5, "part_prompts": 2},
        "interruption": {"use": "partial", "at_update": "resubmit"},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
    "one_step_off_in_parts": {
        "batching": {"use": "one_step_off", "part_prompts": 1},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
    "async_in_parts": {
        "batching": {"use": "fully_async", "part_prompts": 1},
        "interruption": {"use": "partial", "kv": "retain", "at_update": "in_place"},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
    "migration": {"migration": {"use": "tests.helpers:Restless", "interval_s": 0.07131}},
    "async_migration": {
        "batching": {"use": "fully_async"},
        "interruption": {"use": "partial", "kv": "recompute", "at_update": "resubmit"},
        "freshness": {"use": "bounded", "max_staleness": 2},
        "migration": {"use": "tests.helpers:Restless", "interval_s": 0.07131},
    },
}

#: Policies whose routing reads reports. The live driver polls an instance that was not reached at
#: once, whatever its `poll_s`; the closed loop does not, and so knows less from then on.
BY_REPORTS = {"chunks"}

#: No polls and no timeouts: the live driver's actions by its own clock are not simulated.
SETTINGS = Settings(
    poll_s=1e9,
    control_timeout_s=1e9,
    update_timeout_s=1e9,
    abort_timeout_s=1e9,
    stall_s=1e9,
    forgotten_s=1e9,
)
NEVER = 1e9
ERRORS: dict[str, type[Exception]] = {
    "unclear": InstanceError,
    "instance": InstanceUnreached,
    "request": RequestRejected,
    "length": RequestTooLong,
    "nobody": EnginePaused,
}


def scenario(
    instances: int,
    slots: int,
    faults: Sequence[Fault] = (),
    *,
    streams: bool = False,
    rewards: RewardModel | None = None,
) -> Scenario:
    """`streams`: answers are streamed, but the core gets the tokens only if a stream breaks off."""
    base = load_scenario("qwen7b-8xh100-disaggregated")
    change = msgspec.structs.replace
    return change(
        base,
        fleet=change(
            base.fleet, instances=instances, max_num_seqs=slots, max_num_batched_tokens=512
        ),
        trainer=change(base.trainer, fixed_s=1.7, seconds_per_token=1e-4),
        visibility=change(base.visibility, poll_s=0.0, stream_s=NEVER if streams else 0.0),
        # A response that starts over is the same again, as from the live instances of these tests.
        job=change(base.job, prompts_per_step=3, redraws=False),
        rewards=rewards,
        faults=tuple(faults),
    )


#: The turns before the last one, by group and index of the sample.
Before = Mapping[tuple[int, int], tuple[Turn, ...]]


def trace(groups: list[tuple[int, list[int]]], before: Before) -> Trace:
    return Trace(
        "twins",
        {
            f"g{number}": [
                SampleRecord(
                    f"g{number}", index, prompt, (*before.get((number, index), ()), Turn(length))
                )
                for index, length in enumerate(lengths)
            ]
            for number, (prompt, lengths) in enumerate(groups)
        },
    )


class Payload(TokenPayload):
    """Its answers have the trace's lengths; each new start generates other text."""

    def __init__(
        self, world: Live, prompt_ids: list[int], length: int, responder: Responder = IN_GROUP
    ) -> None:
        every = int(world.scenario.visibility.stream_s > 0)
        super().__init__(prompt_ids, {"temperature": 1}, stream_every=every, responder=responder)
        self.world = world
        self.length = length

    async def attempt(self, client: Any, dispatch: Dispatch, order_id: str) -> Outcome:
        self.sampling = {"temperature": 1, "length": self.length - dispatch.response_tokens}
        return await self.befall(dispatch, super().attempt(client, dispatch, order_id))

    async def befall(self, dispatch: Dispatch, attempt: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Run the attempt, unless it is to break off."""
        failing = self.world.failures.failure_of(dispatch, self.world.driver.pump.now)
        if failing is None:
            return await attempt
        try:
            async with asyncio.timeout(failing.after_s):
                return await attempt
        except TimeoutError:
            raise ERRORS[failing.blame](failing.reason) from None


class Trajectory(Payload):
    """A sample of a group, turn by turn."""

    def __init__(self, world: Live, prompt_ids: list[int], sample: SampleRecord) -> None:
        super().__init__(world, prompt_ids, 0)
        self.sample = sample
        self.last = (0, 0)  # attempt and turn

    async def attempt(self, client: Any, dispatch: Dispatch, order_id: str) -> Outcome:
        turns = self.sample.turns
        self.length = sum(turn.output_tokens for turn in turns[: dispatch.turn + 1])
        self.last = (dispatch.attempt, dispatch.turn)
        outcome = await super().attempt(client, dispatch, order_id)
        if outcome.finish == "stop" and dispatch.turn < len(turns) - 1:
            outcome.finish = "turn"
        elif outcome.finish == "stop":
            outcome.finish = self.sample.finish  # "length" of one that was drawn beyond the cap
        return outcome

    async def act(self) -> list[int]:
        attempt, number = self.last
        turn = self.sample.turns[number]
        await asyncio.sleep(turn.tool_s)
        if self.world.failures.of_tool(attempt, self.world.driver.pump.now):
            raise RuntimeError("the tool failed")
        return [7] * turn.observation_tokens

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        self.transcript.observe(attempt, token_ids)


class Judge:
    """Takes the time, and keeps the groups, that the scenario defines."""

    def __init__(self, model: RewardModel, seed: int) -> None:
        self.model = model
        self.seed = seed

    async def judge(self, sample: Made, payload_of: PayloadOf) -> None:
        await asyncio.sleep(self.model.seconds_of(sample, self.seed))

    def note(self, sample: Made, worth: None) -> None:
        pass

    def forget(self, request: str) -> None:
        pass

    async def keeps(self, samples: Sequence[Made], payload_of: PayloadOf) -> bool:
        return self.model.keeps(samples[0].group, self.seed)


class Client:
    """A client that asks, waits, continues its conversation, or loses patience and leaves."""

    payload: Payload

    def __init__(self, world: Live, conversation: Conversation, number: int) -> None:
        self.world = world
        self.conversation = conversation
        self.said = [1000 + number] * conversation.prompt_tokens

    def ask(self) -> None:
        world, conversation = self.world, self.conversation
        traffic = world.workload.traffic
        length = conversation.present.response_tokens
        self.payload = Payload(world, self.said, length, responder=self)
        request = world.driver.submit(
            self.payload,
            conversation.context_tokens,
            traffic.max_tokens,
            conversation.group,
            conversation.session,
        )
        if traffic.patience_s:
            world.later(traffic.patience_s, world.driver.withdraw, request)

    def answer(self, sample: Made) -> None:
        thinks_s = self.conversation.answered(sample.response_tokens)
        if thinks_s is None:
            self.go()
            return
        response_ids = self.payload.response_ids
        observed = self.conversation.context_tokens - len(self.said) - len(response_ids)
        self.said = [*self.said, *response_ids, *[7] * observed]
        self.world.later(thinks_s, self.ask)

    def fail(self, reason: str, error: Exception | None) -> None:
        self.go()

    def go(self) -> None:
        if self.conversation.session and self.conversation.turn:
            self.world.driver.tell(SessionEnded(self.conversation.session))
        self.world.left -= 1
        self.world.look()


def length_of(order: Order, response: OrderedResponse) -> int:
    length: int = order.sampling["length"]
    return length + response.made_tokens


class Live:
    """The live driver with simulated instances and everything that the closed loop has."""

    def __init__(self, policy: PolicyFile, workload: Workload, scenario: Scenario) -> None:
        self.workload = workload
        self.scenario = scenario
        self.journal: list[Any] = []
        self.failures = Failures(scenario.faults)
        self.clients = [] if workload.traffic is None else workload.traffic.conversations()
        self.left = len(workload.groups) + len(self.clients)
        # All are created now, so that their clocks start with the loop's: another origin causes
        # other rounding. Each joins at most twice.
        self.instances = {
            name: [RealtimeInstance(name, scenario.instance, length_of) for _ in range(2)]
            for name in scenario.fleet.names
        }
        self.over = asyncio.Event()
        self.batches: asyncio.Queue[Deliver] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        self.driver = Driver(
            policy.scheduler(workload.prompts_per_step, lengths=workload.length),
            settings=SETTINGS,
            observers=[lambda *entry: self.journal.append(entry)],
            on_deliver=lambda action, payloads: self.batches.put_nowait(action),
            on_group_failed=self.group_failed,
        )
        self.driver.front.endings.on_group_filtered = self.group_filtered
        if scenario.rewards is not None:
            self.driver.judge_by(Judge(scenario.rewards, workload.seed))

    def later(self, seconds: float, callback: Any, *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, callback, *arguments)

    async def run(self) -> list[Any]:
        """The journal."""
        late = {name_of(f.instance) for f in self.scenario.faults if isinstance(f, Joins)}
        for name in self.scenario.fleet.names:
            if name not in late:
                await self.add(name)
        self.submit()
        for number, conversation in enumerate(self.clients):
            self.later(conversation.arrival_s, Client(self, conversation, number).ask)
        for fault in self.scenario.faults:
            if not isinstance(fault, Failing | ToolsFailing):
                self.tasks.append(asyncio.create_task(self.befall(fault)))
        self.tasks.append(asyncio.create_task(self.train()))
        await self.over.wait()
        for task in self.tasks:
            task.cancel()
        assert self.driver.broken is None
        await self.driver.close()
        self.driver.pump.scheduler.check_invariants()
        return self.journal

    def look(self) -> None:
        if not self.left:
            self.over.set()

    async def add(self, name: str) -> None:
        await self.driver.add_instance(self.instances[name].pop())

    async def befall(self, fault: Lost | Leaving | Joins) -> None:
        name = name_of(fault.instance)
        await asyncio.sleep(fault.at_s)
        if isinstance(fault, Joins):
            await self.add(name)
            return
        if isinstance(fault, Lost):
            self.driver.fleet.lose(name, "lost")
        await self.driver.remove_instance(name, drain=isinstance(fault, Leaving))
        if fault.returns_after_s:
            await asyncio.sleep(fault.returns_after_s)
            await self.add(name)

    # -- the trainer -----------------------------------------------------------------------

    def submit(self) -> None:
        workload = self.workload
        for number, group in enumerate(workload.groups):

            def payload(index: int, number: int = number, group: str = group) -> Payload:
                ids = [number + 1] * workload.prompt_tokens(group)
                return Trajectory(self, ids, workload.sample(group, index))

            judged = self.scenario.rewards is not None
            self.driver.submit_group(workload.submission(group, judged=judged), payload)
        if workload.groups:
            self.driver.tell(SubmissionsClosed())
            self.driver.tell(BatchRequested(parts=True))

    async def train(self) -> None:
        left = len(self.workload.groups)
        in_step = 0
        while True:
            part = await self.batches.get()
            tokens = sum(s.prompt_tokens + s.response_tokens for s in part.samples)
            await asyncio.sleep(self.scenario.trainer.step_s(tokens, last=part.last))
            in_step += len({sample.group for sample in part.samples})
            if not part.last:
                continue
            left -= in_step
            self.left -= in_step
            in_step = 0
            self.look()
            if left - self.lost:
                self.driver.publish(part.version + 1, self.load)
                self.driver.tell(BatchRequested(parts=True))

    lost = 0

    def group_failed(self, group: str, error: Exception | None) -> None:
        self.group_filtered(group)

    def group_filtered(self, group: str) -> None:
        self.lost += 1
        self.left -= 1
        self.look()

    async def load(self, client: Any, version: int) -> None:
        await asyncio.sleep(self.scenario.weights.seconds)


#: An instance's answers about an attempt.
ANSWERS = (RequestFinished, RequestInterrupted, TurnFinished)


def ambiguous(journal: list[Any]) -> bool:
    """Whether events at the same time may come in either order: answers of two instances, an answer
    and the loss of an instance, a failed attempt and the removal of another instance, a drained
    instance and the removal of another, or a tool's return and a failed attempt. (`times` are not
    all different: a client may come at the time of a fault, and its request may be moved at once.)
    Only a drained instance is removed at the time of its own last answer."""
    where: dict[int, str] = {}
    before: tuple[float, str] = (-1.0, "")
    failed = {at for at, said, _ in journal if isinstance(said, RequestFailed)}
    lost = {at: said for at, said, _ in journal if isinstance(said, InstanceLost)}
    for at, said, actions in journal:
        if isinstance(said, ToolReturned | TrajectoryEnded) and at in failed:
            return True
        if isinstance(said, InstanceLeaving) and lost.get(at, said).instance != said.instance:
            return True
        where |= {a.attempt: a.instance for a in actions if isinstance(a, Dispatch)}
        gone = lost.get(at)
        if isinstance(said, RequestFailed) and gone and where.get(said.attempt) != gone.instance:
            return True
        answer = isinstance(said, ANSWERS)
        instance = where.get(said.attempt, "") if answer else ""
        if (
            instance
            and at in lost
            and lost[at] != InstanceLost(instance, "drained", requested=True)
        ):
            return True
        if instance and before[0] == at and before[1] not in ("", instance):
            return True
        before = (at, instance)
    return False


def canonical(journal: list[Any]) -> list[tuple[float, Any, str]]:
    """The journal without polls; direct requests are named by number, and the text of the reason
    for a lost instance is left out."""
    asked = [said.request for _, said, _ in journal if isinstance(said, RequestSubmitted)]
    run = asked[0].rpartition(".")[0] if asked else "nothing"
    entries = []
    for at, said, actions in journal:
        if type(said) is InstanceReported:
            continue
        if type(said) is InstanceLost:
            said = InstanceLost(said.instance, requested=said.requested)
        text = msgspec.json.encode((said, actions)).decode().replace(f'"{run}.', '"direct.')
        entries.append((at, said, text))
    return entries


def assert_twins(
    name: str,
    groups: list[tuple[int, list[int]]],
    instances: int,
    slots: int,
    clients: Trace | None = None,
    faults: Sequence[Fault] = (),
    *,
    patience_s: float = 0.0,
    streams: bool = False,
    before: Before = {},  # noqa: B006
    rewards: RewardModel | None = None,
) -> list[Any]:
    """The journal."""
    policy = parse_policy("twins", PRESETS[name])
    world = scenario(instances, slots, faults, streams=streams, rewards=rewards)

    def workload() -> Workload:
        load = Workload(trace(groups, before), world.job)
        model = TrafficModel(patience_s=patience_s)
        load.traffic = None if clients is None else Traffic(model, clients, 0)
        return load

    simulated: list[Any] = []
    load = workload()
    scheduler = policy.scheduler(load.prompts_per_step, lengths=load.length)
    try:
        ClosedLoop(scheduler, load, world, [lambda *entry: simulated.append(entry)]).run()
    except CallerError:
        assume(False)  # no instance is left
    assume(not ambiguous(simulated))
    lived = virtual_loop.run(run_live(policy, workload(), world))
    looked = any(type(said) is InstanceReported for _, said, _ in lived)
    assume(not (looked and name in BY_REPORTS))
    told, live_told = canonical(simulated), canonical(lived)
    for (at, said, text), (live_at, _, live_text) in zip(told, live_told, strict=False):
        assert text == live_text, f"at {at} and {live_at}"
        assert at == pytest.approx(live_at, rel=1e-9, abs=1e-9), said
    # Either run ends at the time of the last event, and may see further events of that time.
    both = min(len(told), len(live_told))
    assert all(at == pytest.approx(told[-1][0]) for at, _, _ in live_told[both:] + told[both:])
    return simulated


async def run_live(policy: PolicyFile, workload: Workload, world: Scenario) -> list[Any]:
    return await Live(policy, workload, world).run()


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Groups of three; equal lengths would end at the same time, in an undefined order."""
    number = draw(st.integers(3, 9))
    prompts = draw(st.lists(st.integers(1, 300), min_size=number, max_size=number, unique=True))
    size = 3 * number
    lengths = draw(st.lists(st.integers(1, 160), min_size=size, max_size=size, unique=True))
    return [(prompt, lengths[3 * k : 3 * k + 3]) for k, prompt in enumerate(prompts)]


#: Under async_in_place an instance confirms a pause at the same time as a request finishes there.
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


@st.composite
def times(draw: st.DrawFn, most: int = 4000) -> float:
    """A time in seconds at which nothing else happens."""
    return draw(st.integers(1, most)) * 0.00271828 + 0.000314159


@st.composite
def conversations(draw: st.DrawFn) -> Trace:
    """Conversations of one to three turns; each client has its own prompt."""
    said: dict[str, list[SampleRecord]] = {}
    prompts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True))
    for number, prompt in enumerate(prompts):
        turns = tuple(
            Turn(draw(st.integers(1, 160)), draw(st.integers(1, 30)), draw(times(600)))
            for _ in range(draw(st.integers(0, 2)))
        )
        turns = (*turns, Turn(draw(st.integers(1, 160))))
        group = f"c{number}"
        said[group] = [SampleRecord(group, 0, prompt, turns, arrival_s=draw(times()))]
    return Trace("clients", said)


@st.composite
def turns_before(draw: st.DrawFn, groups: list[tuple[int, list[int]]]) -> Before:
    """A few samples are trajectories. Their tools end at other times than those of clients."""
    places = [(number, index) for number in range(len(groups)) for index in range(3)]
    if not places:
        return {}
    tool_s = times(900).map(lambda seconds: seconds + 7e-6)
    turn = st.builds(Turn, st.integers(1, 90), st.integers(1, 30), tool_s)
    turns = st.lists(turn, min_size=1, max_size=2).map(tuple)
    return draw(st.dictionaries(st.sampled_from(places), turns, max_size=5))


@st.composite
def faults(draw: st.DrawFn, instances: int) -> tuple[Fault, ...]:
    """At most one for each instance except the first, and attempts that fail anywhere. No two
    happen at the same time, nor at the arrival of a client: their order would be undefined."""
    found: list[Fault] = []
    for number in range(instances):
        kinds = ["none", "lost", "leaving", "joins"] if number else ["none", "lost"]
        kind, at = draw(st.sampled_from(kinds)), draw(times()) + (1 + number) * 1e-6
        back = draw(times(1500)) if not number or draw(st.booleans()) else 0.0
        if kind == "lost":
            found.append(Lost(at_s=at, instance=number, returns_after_s=back))
        elif kind == "leaving":
            found.append(Leaving(at_s=at, instance=number, returns_after_s=back))
        elif kind == "joins":
            found.append(Joins(at_s=at, instance=number))
    if draw(st.booleans()):
        found.append(
            Failing(
                at_s=draw(times()) + 5e-6,
                for_s=draw(times()),
                share=draw(st.sampled_from([0.1, 0.4, 1.0])),
                after_s=draw(times(300)),
                blame=draw(st.sampled_from(list(ERRORS))),
                seed=draw(st.integers(0, 9)),
            )
        )
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.3, 1.0]))
        found.append(ToolsFailing(at_s=draw(times()) + 6e-6, share=share))
    return tuple(found)


@st.composite
def reward_models(draw: st.DrawFn) -> RewardModel:
    """Each takes some time: the judgement of a group at the time of its completion could come
    before or after other events of that time."""
    return RewardModel(
        seconds=draw(times(900)),
        spread=draw(st.sampled_from([0.0, 0.7])),
        filtered=draw(st.sampled_from([0.0, 0.3, 0.8])),
    )


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups=workloads(), instances=st.integers(1, 3), rewards=reward_models())
def test_twins_judge_alike(
    name: str, groups: list[tuple[int, list[int]]], instances: int, rewards: RewardModel
) -> None:
    journal = assert_twins(name, groups, instances, 3, rewards=rewards)
    judged = [said.verdict for _, said, _ in journal if isinstance(said, GroupJudged)]
    assert len(judged) >= len(groups)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), slots=st.integers(1, 8), streams=st.booleans())
def test_twins_in_a_rough_world(name: str, data: st.DataObject, slots: int, streams: bool) -> None:
    """Trajectories; clients with sessions, which lose patience; instances that are lost, drained or
    late; attempts and tools that fail.
    """
    groups = data.draw(st.one_of(workloads(), st.just([])))
    instances = data.draw(st.integers(1, 3))
    journal = assert_twins(
        name,
        groups,
        instances,
        slots,
        data.draw(conversations()),
        data.draw(faults(instances)),
        patience_s=data.draw(st.one_of(st.just(0.0), times(1500))),
        streams=streams,
        before=data.draw(turns_before(groups)),
        rewards=data.draw(st.one_of(st.none(), reward_models())),
    )
    for kind in {type(said).__name__ for _, said, _ in journal}:
        event(kind)
