"""A scenario: the fleet, the trainer and what the scheduler can see, as one TOML file."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.config import (
    ConfigError,
    check_finite,
    nearest,
    read_toml,
    unknown_key,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import (
    MAX_COUNT,
    MAX_SIZE,
    Count,
    DeliveredSample,
    Signed,
    Size,
)
from rollout_sched.simulators import traces
from rollout_sched.simulators.instance import CostModel, InstanceSpec, Speculation
from rollout_sched.simulators.replay.faults import (
    KINDS,
    Failing,
    Fault,
    Joins,
    SchedulerRestarts,
    ToolsFailing,
    name_of,
)
from rollout_sched.simulators.replay.links import Links, NetworkLink, TransferCost
from rollout_sched.simulators.traces.model import UNIX_S, SampleRecord, Trace, Turn
from rollout_sched.simulators.traces.model import Duration as Seconds

# ------------------------------------------------------------------------------------------
# Traffic: conversations of clients, whose requests are direct, with or without batches.

Rate = Annotated[float, msgspec.Meta(ge=0)]

#: Conversations that one scenario may draw; all are kept in memory.
MOST_CLIENTS = 1_000_000


class TrafficModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients of the gateway. They arrive whether or not others have been answered (open loop).

    A conversation is a sample of a trace: each of its turns is one request, the observation is the
    client's next message, and the tool's seconds are the client's pause before it. All requests of
    a conversation with several turns carry its session.

    rate        conversations that begin per second, at random (Poisson), each with any sample of
                the trace; 0: each sample once, at the arrival time in the trace
    for_s       new conversations begin for this long; with a rate of 0, 0 is the whole trace
    trace       the source of samples: a file or a shipped trace; "" is the replayed trace
    patience_s  a client that has waited this long for a response withdraws and leaves; 0: never
    max_tokens  of one response; 0: the trace's cap
    seed        another seed gives other clients, as does each of a replay's seeds
    """

    rate: Rate = 0.0
    for_s: Seconds = 0.0
    trace: str = ""
    patience_s: Seconds = 0.0
    max_tokens: Count = 0
    seed: Signed = 0


@dataclass(slots=True, eq=False)
class Conversation:
    """One client and its progress.

    prompt          names the text of its first `prompt_tokens` tokens
    turn            of the request in flight, or of the next one
    context_tokens  of that request: its prompt, as the scheduler sees it
    known_tokens    how many of these some instance has computed
    stream          names the text after the prompt: the attempt that began it
    """

    name: str
    arrival_s: float
    sample: SampleRecord
    prompt_tokens: int
    turn: int = 0
    known_tokens: int = 0
    stream: int = 0
    prompt: str = field(init=False)
    context_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = f"client/{self.sample.group}"
        self.context_tokens = self.prompt_tokens

    @property
    def session(self) -> str:
        return self.name if len(self.sample.turns) > 1 else ""

    @property
    def group(self) -> str:
        """Requests with the same prompt are siblings. After the first turn no other client has the
        same prompt."""
        return f"{self.name}/{self.turn}" if self.turn else self.prompt

    @property
    def present(self) -> SampleRecord:
        """The current turn, as a sample of its own."""
        sample, turn = self.sample, self.sample.turns[self.turn]
        last = self.turn == len(sample.turns) - 1
        return SampleRecord(
            sample.group,
            sample.sample,
            self.context_tokens,
            (Turn(turn.output_tokens),),
            finish=sample.finish if last else "stop",
        )

    def answered(self, response_tokens: int) -> float | None:
        """Advance to the next turn; returns the seconds until it, None if there is none."""
        turn = self.sample.turns[self.turn]
        self.turn += 1
        if self.turn == len(self.sample.turns):
            return None
        self.known_tokens = self.context_tokens + response_tokens
        self.context_tokens = self.known_tokens + turn.observation_tokens
        return turn.tool_s


class Traffic:
    """The conversations of a run, the same for every policy, and the cap of a response."""

    def __init__(self, model: TrafficModel, replayed: Trace, seed: int) -> None:
        trace = traces.read(model.trace) if model.trace else replayed
        self.patience_s = model.patience_s
        self.max_tokens = model.max_tokens or trace.cap
        self._trace = trace
        self._lengths: dict[str, int] = {}
        prompts = {
            name: max(sample.prompt_tokens for sample in members)
            for name, members in trace.groups.items()
        }
        chosen = _drawn(model, trace, seed) if model.rate else _recorded(model, trace)
        self._chosen = [
            (f"session-{number}", at, sample, prompts[sample.group])
            for number, (at, sample) in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self._chosen)

    def conversations(self) -> list[Conversation]:
        """All conversations, none started, in the order of their arrival."""
        return [Conversation(*each) for each in self._chosen]

    @property
    def most_tokens(self) -> int:
        """The most that any request may need: the conversation before it, and its response."""
        return max((self._most(sample, prompt) for _, _, sample, prompt in self._chosen), default=0)

    def length(self, group: str) -> int:
        """Tokens of a response to this prompt; exact if only one client asks it."""
        if not self._lengths:
            self._lengths = self._learn_lengths()
        return self._lengths[group]

    def _most(self, sample: SampleRecord, prompt_tokens: int) -> int:
        said = sum(
            min(turn.output_tokens, self.max_tokens) + turn.observation_tokens
            for turn in sample.turns[:-1]
        )
        return prompt_tokens + said + self.max_tokens

    def _learn_lengths(self) -> dict[str, int]:
        """By group: the mean over the clients that ask the same."""
        made: dict[str, list[int]] = {}
        for conversation in self.conversations():
            for turn in conversation.sample.turns:
                length = min(turn.output_tokens, self.max_tokens)
                made.setdefault(conversation.group, []).append(length)
                conversation.turn += 1
        return {group: round(sum(each) / len(each)) for group, each in made.items()}


def _drawn(model: TrafficModel, trace: Trace, seed: int) -> Iterator[tuple[float, SampleRecord]]:
    rng = random.Random(f"traffic/{model.seed}/{seed}")
    samples = list(trace.samples())
    at = rng.expovariate(model.rate)
    while at < model.for_s:
        yield at, rng.choice(samples)
        at += rng.expovariate(model.rate)


def _recorded(model: TrafficModel, trace: Trace) -> list[tuple[float, SampleRecord]]:
    """Raises CallerError if the trace has no arrival times."""
    samples = sorted(trace.samples(), key=lambda sample: sample.arrival_s)
    if not samples[-1].arrival_s:
        raise CallerError(
            f"trace {trace.name} has no arrival times of samples; set traffic.rate and "
            f"traffic.for_s in the scenario, or give samples an arrival_s"
        )
    until = model.for_s or float("inf")
    return [(sample.arrival_s, sample) for sample in samples if sample.arrival_s < until]


# ------------------------------------------------------------------------------------------
# How samples are judged, how long a training step takes, the fleet, and what a scheduler sees.


class RewardModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long rewards take and which groups are filtered, except groups whose verdict was
    recorded. Both are drawn by sample and by group, not by attempt: under every policy the same
    samples take equally long, and the same groups are filtered.

    seconds   that a reward takes, on average
    spread    standard deviation of their logarithm (they are lognormal); 0: all take equally long
    filtered  share of the groups that are not kept once their rewards are known
    seed      another seed draws other samples and groups, as does each of a replay's seeds
    """

    seconds: Seconds = 0.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    filtered: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    seed: Signed = 0

    def seconds_of(self, sample: DeliveredSample, seed: int) -> float:
        if not self.spread:
            return self.seconds
        drawn = random.Random(f"{self.seed}/{seed}/{sample.group}/{sample.index}").gauss(0, 1)
        return self.seconds * math.exp(self.spread * (drawn - self.spread / 2))

    def keeps(self, group: str, seed: int) -> bool:
        return random.Random(f"{self.seed}/{seed}/{group}").random() >= self.filtered


class TrainerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training step takes `fixed_s + seconds_per_token * tokens` (prompt and response tokens).

    If the batch comes in parts, each takes `seconds_per_token * tokens`, and the step takes
    `fixed_s` more when the last part is trained.

    `placement`: "disaggregated" trains on its own GPUs; "colocated" uses the instances' GPUs, so
    generation stops during training. `keeps_kv`: whether a colocated instance still has its KV
    cache afterwards (engines that sleep to free memory for the optimiser lose it).
    """

    placement: Literal["colocated", "disaggregated"] = "disaggregated"
    fixed_s: Seconds = 5.0
    seconds_per_token: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1e-5
    keeps_kv: bool = False

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    def step_s(self, tokens: int, *, last: bool = True) -> float:
        """Seconds for a batch, or for a part of it that may not be the `last`."""
        return (self.fixed_s if last else 0.0) + self.seconds_per_token * tokens


AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]

#: Optional tables of a scenario.
OPTIONAL: dict[str, type[Any]] = {
    "traffic": TrafficModel,
    "rewards": RewardModel,
    "links": Links,
    "speculation": Speculation,
}


class FleetModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of identical instances. `kv_tokens`: KV capacity of one instance, tokens."""

    instances: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
    kv_tokens: AtLeastOne
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 16
    max_num_seqs: AtLeastOne = 256
    max_num_batched_tokens: AtLeastOne = 8192
    max_model_len: AtLeastOne = 131_072
    prefix_caching: bool = True

    @property
    def names(self) -> list[str]:
        return [name_of(number) for number in range(self.instances)]


#: No live scheduler looks more often.
LEAST_S = 1e-3


class Visibility(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a live scheduler would see: gauges every `poll_s`, tokens so far every `stream_s`.

    0 turns it off. Between reports, the progress of a running request is unknown.
    """

    poll_s: Seconds = 1.0
    stream_s: Seconds = 0.0

    def __post_init__(self) -> None:
        for name, every_s in (("poll_s", self.poll_s), ("stream_s", self.stream_s)):
            if 0 < every_s < LEAST_S:
                raise ValueError(f"{name} must be 0, or at least {LEAST_S:g} s, not {every_s:g}")


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer requests.

    prompts_per_step    0: the trace's; if it has none, 64, or as many as give four steps
    samples_per_prompt  0: the trace's group size, divided by the epochs
    max_tokens          maximum length of a response; 0: the trace's cap
    batches             false: no training, only [traffic]
    epochs              how often every prompt is trained, each time with other samples
    known_samples       N samples of each prompt are not trained: their lengths are what the trainer
                        knows of the prompt before the run
    redraws             a sample that starts over gets another length, as in a real run, from a
                        distribution fitted to the trace; else the same response as before
    growth              responses of the last step are so many times as long as recorded, those of
                        the first step as recorded, in a geometric progression, cut at `max_tokens`
    """

    prompts_per_step: Size = 0
    samples_per_prompt: Size = 0
    max_tokens: Count = 0
    batches: bool = True
    epochs: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 1
    known_samples: Count = 0
    redraws: bool = True
    growth: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything except the trace and the policy.

    `traffic`: clients of the gateway, if any. `rewards`: how samples are judged, if they are.
    `links`: links to fronts between the scheduler and the instances, if any. `speculation`: tokens
    that the instances draft, if they do. `network`: links on which weights travel. `faults`: what
    happens to instances, in any order.
    """

    fleet: FleetModel
    cost: CostModel
    name: str = ""
    about: str = ""
    source: str = ""
    trainer: TrainerModel = TrainerModel()
    weights: TransferCost = TransferCost()
    visibility: Visibility = Visibility()
    job: Job = Job()
    traffic: TrafficModel | None = None
    rewards: RewardModel | None = None
    links: Links | None = None
    speculation: Speculation | None = None
    network: tuple[NetworkLink, ...] = ()
    faults: tuple[Fault, ...] = ()

    def with_job(self, given: Mapping[str, Any]) -> Scenario:
        """This scenario with another job. Numbers that are 0, and names that are not of a job, are
        ignored."""
        names = [name for name in Job.__struct_fields__ if name in given]
        changed = {name: given[name] for name in names if given[name] or given[name] is False}
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, **changed))

    @property
    def kv_tokens(self) -> int:
        """What the drafter leaves of an instance's KV capacity."""
        drafts, tokens = self.speculation, self.fleet.kv_tokens
        return tokens if drafts is None else int(tokens * (1 - drafts.kv_share))

    @property
    def instance(self) -> InstanceSpec:
        """The specification of each simulated instance."""
        fleet, drafts = self.fleet, self.speculation
        return InstanceSpec(
            cost=self.cost,
            kv_blocks=self.kv_tokens // fleet.block_size,
            block_size=fleet.block_size,
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
            max_model_len=fleet.max_model_len,
            prefix_caching=fleet.prefix_caching,
            speculation=drafts,
        )

    @property
    def least_cost(self) -> CostModel:
        """Constants with which no step takes longer than it does on these instances."""
        return self.cost if self.speculation is None else self.speculation.least_cost(self.cost)

    @property
    def least_update_s(self) -> float:
        """The least from the end of a training step until any instance can have its weights."""
        cost, on = self.weights, [link.instances for link in self.network]
        rates = [link.bytes_per_s for link in self.network]
        if all(on) and len({number for each in on for number in each}) < self.fleet.instances:
            rates.append(cost.bytes_per_s)
        load_s = cost.from_host_s if cost.staged else cost.fixed_s
        return cost.convert_s + (load_s + cost.bytes / max(rates))


def load_scenario(name_or_path: str) -> Scenario:
    """Read a shipped scenario by name or a TOML file by path.

    Raises ConfigError naming the file and the key path.
    """
    name, table = read_toml(name_or_path, "simulators/replay/scenarios", "scenario")
    return parse_scenario(name, table)


def parse_scenario(name: str, table: dict[str, Any]) -> Scenario:
    """Check a scenario given as nested tables."""
    _check_keys(name, "", table, Scenario)
    _check_faults(name, table.get("faults", []))
    for number, link in enumerate(_tables(name, "network", table.get("network", []))):
        _check_keys(name, f"network[{number}].", link, NetworkLink)
    try:
        scenario = msgspec.convert({**table, "name": name}, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}".replace(" - at `$.", ": at `")) from error
    _check_sense(name, scenario)
    _check_network(name, scenario)
    try:
        _ = scenario.instance
    except ValueError as error:
        raise ConfigError(f"{name}: fleet: {error}") from error
    return scenario


def _check_sense(name: str, scenario: Scenario) -> None:
    """Check what involves several values."""
    fleet, traffic = scenario.fleet, scenario.traffic
    if scenario.kv_tokens < fleet.block_size:
        drafter = " or lower speculation.kv_share" if scenario.kv_tokens < fleet.kv_tokens else ""
        raise ConfigError(f"{name}: fleet.kv_tokens: less than one block; increase it{drafter}")
    if traffic is not None and traffic.rate and not traffic.for_s:
        raise ConfigError(
            f"{name}: traffic.for_s: missing; set for how many seconds {traffic.rate:g} "
            f"conversations per second begin"
        )
    if traffic is not None and traffic.rate * traffic.for_s > MOST_CLIENTS:
        raise ConfigError(
            f"{name}: traffic: {traffic.rate:g} conversations per second for {traffic.for_s:g} s "
            f"are more than {MOST_CLIENTS:,}; lower traffic.rate or traffic.for_s"
        )
    if scenario.links is not None and (traffic is not None or scenario.faults):
        raise ConfigError(
            f"{name}: links: not supported with [traffic] or [[faults]]; leave those out"
        )
    if traffic is None and not scenario.job.batches:
        raise ConfigError(
            f"{name}: job.batches is false and there is no [traffic], so there are no requests; "
            f"add [traffic], or set job.batches to true"
        )
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, Failing) and fault.ends_everything:
            raise ConfigError(
                f"{name}: faults[{number}]: no instance can ever be reached again, so the run "
                f"would not end; set for_s, a share below 1, or one instance"
            )
        instance = None
        if not isinstance(fault, ToolsFailing | SchedulerRestarts):
            instance = fault.instance
        if instance is not None and instance >= fleet.instances:
            raise ConfigError(
                f"{name}: faults[{number}].instance = {instance}: the fleet has "
                f"{fleet.instances}, numbered from 0"
            )
    if len({f.instance for f in scenario.faults if isinstance(f, Joins)}) >= fleet.instances:
        raise ConfigError(f"{name}: faults: every instance joins later; leave one at the start")


def _check_network(name: str, scenario: Scenario) -> None:
    fleet, weights = scenario.fleet.instances, scenario.weights
    linked: set[int] = set()
    for place, link in enumerate(scenario.network):
        on = link.instances or range(fleet)
        if max(on) >= fleet:
            raise ConfigError(
                f"{name}: network[{place}].instances: {max(on)}: the fleet has {fleet}, numbered "
                f"from 0"
            )
        if len(on) != len(set(on)) or linked.intersection(on):
            raise ConfigError(
                f"{name}: network[{place}].instances: an instance is on one link, once; name the "
                f"instances of each"
            )
        linked.update(on)
        if not weights.convert_s + 2 * len(on) * weights.bytes / link.bytes_per_s < UNIX_S:
            raise ConfigError(f"{name}: network[{place}].bytes_per_s: too low for weights.bytes")
    if len({link.name for link in scenario.network}) < len(scenario.network):
        raise ConfigError(f"{name}: network: two links have the same name; give each its own")


def _tables(name: str, key: str, tables: Any) -> list[Any]:
    if not isinstance(tables, list):
        raise ConfigError(f"{name}: {key}: expected tables, as in [[{key}]]")
    return tables


def _check_faults(name: str, faults: Any) -> None:
    for number, fault in enumerate(_tables(name, "faults", faults)):
        path = f"faults[{number}]"
        what = fault.get("what") if isinstance(fault, dict) else None
        if not isinstance(what, str) or what not in KINDS:
            raise ConfigError(
                f"{name}: {path}.what: expected one of {', '.join(KINDS)}"
                + ("" if what is None else f", not {what!r}{nearest(str(what), KINDS)}")
            )
        table = {key: value for key, value in fault.items() if key != "what"}
        _check_keys(name, f"{path}.", table, KINDS[what])


def _check_keys(name: str, path: str, table: Any, kind: Any) -> None:
    """Checked in a pass of its own, because msgspec reports an unknown field without suggesting
    similar names."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: {path.rstrip('.')}: expected a table")
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise unknown_key(name, f"{path}{key}", fields)
        check_finite(name, f"{path}{key}", value)
        table_type = OPTIONAL.get(key, fields[key])
        if isinstance(table_type, type) and issubclass(table_type, msgspec.Struct):
            _check_keys(name, f"{path}{key}.", value, table_type)
