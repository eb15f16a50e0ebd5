"""A grid of replays: policies and scenarios with several values for some of their parameters.

    freshness.max_staleness=1,2,4    a parameter of the policy: role, name, values
    fleet.instances=4,8              a value of the scenario: table, key, values

A name that is both a role and a table of the scenario (`weights`) is looked up in the policy first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from rollout_sched.config import REGISTRY, PolicyFile, parse_policy, read_toml
from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.replay.scenario import Scenario, parse_scenario

Table = dict[str, Any]


class Axis(msgspec.Struct, frozen=True):
    """The values of one key in a table (a role of the policy, or a table of the scenario)."""

    table: str
    key: str
    values: tuple[Any, ...]

    @property
    def path(self) -> str:
        return f"{self.table}.{self.key}"


class World(msgspec.Struct, frozen=True):
    """A scenario, and what was changed from its file ("" for nothing). `split`: the number of GPUs
    divided between its fleet and trainer; 0 without --split."""

    scenario: Scenario
    said: str
    split: int = 0


def axis(text: str) -> Axis:
    """Read `table.key=value,value,...`; values as in TOML, but strings without quotes. Raises
    ValueError."""
    path, equals, values = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key and values):
        raise ValueError(f"{text!r}: expected table.key=value,value,...")
    return Axis(table, key, tuple(_value(word.strip()) for word in values.split(",")))


def _value(word: str) -> Any:
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word.replace("_", ""))
        except ValueError:
            continue
    return word


def policies(names: Sequence[str], axes: Sequence[Axis]) -> list[PolicyFile]:
    """Each policy at each point of the axes that it has; a policy without any of them is unchanged.

    Raises ConfigError for an invalid value, CallerError for an axis that no policy has.
    """
    found: list[PolicyFile] = []
    used: set[str] = set()
    for name_or_path in names:
        name, table = read_toml(name_or_path, "policies/presets", "policy")
        own = [axis for axis in axes if _has(parse_policy(name, table), axis)]
        used |= {axis.path for axis in own}
        found += [
            parse_policy(f"{name} {said}".strip(), changed) for changed, said in _points(table, own)
        ]
    for one in axes:
        if one.path not in used:
            raise CallerError(f"--set {one.path}: none of the policies has such a parameter")
    return found


def worlds(name_or_path: str, axes: Sequence[Axis]) -> list[World]:
    """The scenario at each point of the axes. Raises ConfigError."""
    name, table = read_toml(name_or_path, "simulators/replay/scenarios", "scenario")
    return [World(parse_scenario(name, point), said) for point, said in _points(table, axes)]


def split(world: World, gpus: int) -> list[World]:
    """Every split of `gpus` between fleet and trainer, with one instance per GPU.

    The trainer's time per token scales with its GPUs; the scenario gives it for the GPUs that its
    own fleet leaves. Raises CallerError if fleet and trainer share their GPUs, or if there are too
    few.
    """
    scenario = world.scenario
    own = gpus - scenario.fleet.instances
    if scenario.trainer.colocated or own < 1:
        raise CallerError(
            f"--split {gpus}: scenario {scenario.name} has {scenario.fleet.instances} instances, "
            f"and its trainer needs GPUs of its own in addition"
        )
    each = []
    for instances in range(1, gpus):
        fleet = msgspec.structs.replace(scenario.fleet, instances=instances)
        trainer = msgspec.structs.replace(
            scenario.trainer,
            seconds_per_token=scenario.trainer.seconds_per_token * own / (gpus - instances),
        )
        said = f"{world.said} {instances} + {gpus - instances} GPUs".strip()
        each.append(
            World(msgspec.structs.replace(scenario, fleet=fleet, trainer=trainer), said, gpus)
        )
    return each


def is_of_policies(axis: Axis) -> bool:
    """Whether a policy has it. Raises CallerError if neither policies nor scenarios can have it."""
    if any(axis.key in _parameters(cls) for cls in REGISTRY.get(axis.table, {}).values()):
        return True
    if axis.table not in Scenario.__struct_fields__:
        what = "parameter" if axis.table in REGISTRY else "role or scenario table"
        raise CallerError(f"--set {axis.path}: there is no such {what}")
    return False


def _has(policy: PolicyFile, axis: Axis) -> bool:
    cls, _ = policy.roles[axis.table]
    return axis.key in _parameters(cls)


def _parameters(cls: Any) -> tuple[str, ...]:
    return getattr(cls, "__struct_fields__", ())


def _points(table: Mapping[str, Any], axes: Sequence[Axis]) -> Iterator[tuple[Table, str]]:
    """The table at each point, and the text that describes the point."""
    for values in product(*(axis.values for axis in axes)):
        changed: Table = dict(table)
        for one, value in zip(axes, values, strict=True):
            changed[one.table] = {**changed.get(one.table, {}), one.key: value}
        said = [f"{one.path}={value}" for one, value in zip(axes, values, strict=True)]
        yield changed, " ".join(said)
