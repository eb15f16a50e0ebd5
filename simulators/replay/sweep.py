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

from rollout_sched.config import (
    REGISTRY,
    PolicyFile,
    nearest,
    parse_policy,
    read_policy,
    read_toml,
    scalar,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.page.run_page import run_page
from rollout_sched.simulators.replay.comparison import FRONTIER, frontier
from rollout_sched.simulators.replay.report import STALENESS_AXIS, charted
from rollout_sched.simulators.replay.scenario import Scenario, parse_scenario
from rollout_sched.simulators.replay.tables import (
    LONGEST_TENTH,
    STALENESS,
    TOKENS,
    Column,
    grid,
    legend,
    number,
    wrapped,
)
from rollout_sched.terminal import count, seconds

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
    CallerError."""
    path, equals, values = text.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and table and key and values):
        raise CallerError(f"--set {text}: expected table.key=value,value,...")
    return Axis(table, key, tuple(scalar(word.strip()) for word in values.split(",")))


def policies(
    names: Sequence[str | PolicyFile], axes: Sequence[Axis], *, allow_code: bool = False
) -> list[PolicyFile]:
    """Each policy, a file or one that is read, at each point of the axes that it has; a policy
    without any of them is unchanged.

    `allow_code`: as in `load_policy`. Raises ConfigError for an invalid value, CallerError for an
    axis that no policy has.
    """
    found: list[PolicyFile] = []
    used: set[str] = set()
    for given in names:
        if isinstance(given, PolicyFile):
            name, table = given.name, given.tables
        else:
            name, table = read_policy(given, allow_code=allow_code)
        own = [axis for axis in axes if _has(parse_policy(name, table), axis)]
        used |= {axis.path for axis in own}
        found += [
            parse_policy(f"{name} {said}".strip(), changed) for changed, said in _points(table, own)
        ]
    for one in axes:
        if one.path not in used:
            raise CallerError(f"--set {one.path}: none of the policies has such a parameter")
    return found


def worlds(given: str | Scenario, axes: Sequence[Axis]) -> list[World]:
    """The scenario, a file or one that is read, at each point of the axes. Raises ConfigError."""
    if isinstance(given, Scenario):
        name, tables = given.name, msgspec.json.decode(msgspec.json.encode(given))
        table = {key: value for key, value in tables.items() if value is not None}
    else:
        name, table = read_toml(given, "simulators/replay/scenarios", "scenario")
    return [
        World(_changed(parse_scenario(name, point), said), said)
        for point, said in _points(table, axes)
    ]


def _changed(scenario: Scenario, said: str) -> Scenario:
    """Its description, with what was changed."""
    about = f"{scenario.about} Changed: {said}.".lstrip() if said else scenario.about
    return msgspec.structs.replace(scenario, about=about)


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
        changed = msgspec.structs.replace(scenario, fleet=fleet, trainer=trainer)
        each.append(World(_changed(changed, said), said, gpus))
    return each


def is_of_policies(axis: Axis) -> bool:
    """Whether a policy has it. Raises CallerError if neither policies nor scenarios can have it."""
    keys = {key for cls in REGISTRY.get(axis.table, {}).values() for key in _parameters(cls)}
    if axis.key in keys:
        return True
    if axis.table not in Scenario.__struct_fields__:
        what, near = "parameter", nearest(axis.key, keys)
        if axis.table not in REGISTRY:
            what = "role or scenario table"
            near = nearest(axis.table, [*REGISTRY, *Scenario.__struct_fields__])
        raise CallerError(f"--set {axis.path}: there is no such {what}{near}")
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


# ------------------------------------------------------------------------------------------
# The report of a grid of replays: one table over all of them, and the frontier.

SCHEMA = "rollout-sched-sweep/1"

COLUMNS = (
    Column("inst.", "instances", count, "instances in the fleet"),
    TOKENS,
    Column("total", "total_s", seconds, "until every prompt is trained"),
    *STALENESS,
    LONGEST_TENTH,
    Column("step KS", "comparison.step_ks_excess", number, "of a step against all, beyond chance"),
)


def document(reports: Sequence[Mapping[str, Any]], worlds: Sequence[World]) -> dict[str, Any]:
    """The report of each world, as a single `replay` would give it, and what was changed in it;
    also which of their policies are on the frontier."""
    rows = [
        {**policy, "world": world.said, "gpus": _gpus(report, world)}
        for report, world in zip(reports, worlds, strict=True)
        for policy in report["policies"]
    ]
    best = frontier(rows)
    return {
        "schema": SCHEMA,
        "worlds": [
            {"changed": world.said, "gpus": _gpus(report, world), **report}
            for report, world in zip(reports, worlds, strict=True)
        ],
        "frontier": [
            {"world": rows[place]["world"], "policy": rows[place]["name"]} for place in best
        ],
    }


def _gpus(report: Mapping[str, Any], world: World) -> int:
    """The GPUs that --split divided; without it, one per instance."""
    gpus: int = world.split or report["instances"]
    return gpus


def rows_of(sweep: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of each policy in each world, fastest first; the name says the world, too, and
    `on_frontier` whether it is there."""
    on_frontier = {(one["world"], one["policy"]) for one in sweep["frontier"]}
    rows = [
        {
            **policy,
            "instances": world["instances"],
            "gpus": world["gpus"],
            "name": " | ".join(part for part in (policy["name"], world["changed"]) if part),
            "on_frontier": (world["changed"], policy["name"]) in on_frontier,
        }
        for world in sweep["worlds"]
        for policy in world["policies"]
    ]
    return sorted(rows, key=lambda row: -row["equal_length_tokens_per_s"]["mean"])


def table(sweep: Mapping[str, Any], width: int) -> str:
    """One row for each policy in each world, fastest first; `*` marks the Pareto frontier."""
    rows = rows_of(sweep)
    names = [f"{'*' if row['on_frontier'] else ' '} {row['name']}" for row in rows]
    lines = grid(COLUMNS, names, rows, width)
    says = [legend(COLUMNS), f"* Pareto frontier: {FRONTIER}."]
    return "\n".join([*lines[1:], "", *(line for text in says for line in wrapped(text, width))])


#: What speed is drawn against: a label, and the figure of a row.
_AXES = (
    STALENESS_AXIS,
    ("bias of a step, KS beyond chance", "comparison.step_ks_excess"),
    ("share of the longest tenth that was trained", "length_bias.longest_tenth_kept"),
    ("GPUs", "gpus"),
    ("instances in the fleet", "instances"),
)


def sweep_page(sweep: Mapping[str, Any], made: Sequence[str] = ()) -> bytes:
    """The page for the document of a sweep: the table and charts. `made`: as in `run_page`."""
    first, rows = sweep["worlds"][0], rows_of(sweep)
    return run_page(
        f"{first['trace']}: {len(sweep['worlds'])} worlds",
        [],
        about=[f"{first['groups']} groups, {len(rows)} replays."],
        answer=charted(COLUMNS, rows, TOKENS, _AXES),
        made=made,
    )
