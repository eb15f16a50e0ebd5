"""A scenario: the fleet, the trainer and what the scheduler can see, as one TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rollout_sched.config import (
    ConfigError,
    check_finite,
    nearest,
    read_toml,
    unknown_key,
)
from rollout_sched.simulators.instance.cost_model import CostModel
from rollout_sched.simulators.instance.spec import InstanceSpec
from rollout_sched.simulators.replay.faults import (
    KINDS,
    Failing,
    Fault,
    Joins,
    SchedulerRestarts,
    ToolsFailing,
    name_of,
)
from rollout_sched.simulators.replay.policy_drift import PolicyDrift
from rollout_sched.simulators.replay.rewards import RewardModel
from rollout_sched.simulators.replay.sim_links import Links
from rollout_sched.simulators.replay.traffic import TrafficModel
from rollout_sched.simulators.replay.trainer import TrainerModel, TransferCost

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

#: Optional tables of a scenario.
OPTIONAL: dict[str, type[Any]] = {
    "traffic": TrafficModel,
    "rewards": RewardModel,
    "links": Links,
}


class FleetModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of identical instances. `kv_tokens`: KV capacity of one instance, tokens."""

    instances: AtLeastOne
    kv_tokens: AtLeastOne
    block_size: AtLeastOne = 16
    max_num_seqs: AtLeastOne = 256
    max_num_batched_tokens: AtLeastOne = 8192
    max_model_len: AtLeastOne = 131_072
    prefix_caching: bool = True

    @property
    def names(self) -> list[str]:
        return [name_of(number) for number in range(self.instances)]


class Visibility(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a live scheduler would see: gauges every `poll_s`, tokens so far every `stream_s`.

    0 turns it off. Between reports, the progress of a running request is unknown.
    """

    poll_s: Seconds = 1.0
    stream_s: Seconds = 0.0


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer requests; 0 takes the value from the trace.

    `prompts_per_step` 0: 64, or as many as give four steps. `samples_per_prompt` 0: the trace's
    group size, divided by the epochs. `max_tokens` 0: the trace's cap. `batches` false: no
    training, only [traffic]. `epochs`: how often every prompt is trained, each time with other
    samples. `known_samples` of each prompt are not trained: their lengths are what the trainer
    knows of the prompt before the run. `redraws`: a sample that starts over is drawn again from
    those recorded of its prompt, as in a real run; else it gets the same response as before.
    """

    prompts_per_step: Count = 0
    samples_per_prompt: Count = 0
    max_tokens: Count = 0
    batches: bool = True
    epochs: AtLeastOne = 1
    known_samples: Count = 0
    redraws: bool = False


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything except the trace and the policy.

    `traffic`: clients of the gateway, if any. `rewards`: how samples are judged, if they are.
    `links`: links to fronts between the scheduler and the instances, if any. `faults`: what happens
    to instances, in any order.
    """

    fleet: FleetModel
    cost: CostModel
    name: str = ""
    about: str = ""
    source: str = ""
    trainer: TrainerModel = TrainerModel()
    weights: TransferCost = TransferCost()
    visibility: Visibility = Visibility()
    policy_drift: PolicyDrift = PolicyDrift()
    job: Job = Job()
    traffic: TrafficModel | None = None
    rewards: RewardModel | None = None
    links: Links | None = None
    faults: tuple[Fault, ...] = ()

    def with_job(self, given: Mapping[str, Any]) -> Scenario:
        """The same scenario with another job. Values of 0, and names that are not of a job, are
        ignored."""
        changed = {name: given[name] for name in Job.__struct_fields__ if given.get(name)}
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, **changed))

    @property
    def instance(self) -> InstanceSpec:
        """The specification of each simulated instance."""
        fleet = self.fleet
        return InstanceSpec(
            cost=self.cost,
            kv_blocks=fleet.kv_tokens // fleet.block_size,
            block_size=fleet.block_size,
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
            max_model_len=fleet.max_model_len,
            prefix_caching=fleet.prefix_caching,
        )


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
    try:
        scenario = msgspec.convert({**table, "name": name}, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}".replace(" - at `$.", ": at `")) from error
    _check_sense(name, scenario)
    try:
        _ = scenario.instance
    except ValueError as error:
        raise ConfigError(f"{name}: fleet: {error}") from error
    return scenario


def _check_sense(name: str, scenario: Scenario) -> None:
    """Check what involves several values."""
    fleet, traffic = scenario.fleet, scenario.traffic
    if fleet.kv_tokens < fleet.block_size:
        raise ConfigError(f"{name}: fleet.kv_tokens: less than one block; increase it")
    if traffic is not None and traffic.rate and not traffic.for_s:
        raise ConfigError(
            f"{name}: traffic.for_s: missing; set for how many seconds {traffic.rate:g} "
            f"conversations per second begin"
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


def _check_faults(name: str, faults: Any) -> None:
    if not isinstance(faults, list):
        raise ConfigError(f"{name}: faults: expected tables, as in [[faults]]")
    for number, fault in enumerate(faults):
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
    """Checked here because msgspec reports an unknown field without suggesting similar names."""
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
