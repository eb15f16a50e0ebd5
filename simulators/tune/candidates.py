"""Candidates: policies to try, from presets, drawn from the space, or neighbours of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from rollout_sched import config
from rollout_sched.config import ConfigError, PolicyFile
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.space import Setting, Table

#: Always among the candidates: what frameworks do, and plain load balancers.
BASELINES = ("static_split", "round_robin_sync", "dplb")
#: The policy that speed-ups are relative to, unless that of a recorded run is.
REFERENCE = "round_robin_sync"

#: How often a draw takes the plainest policy of a role, because most unusual choices are bad.
_PLAIN = 0.5
#: How often a neighbour has one more change.
_AND_ANOTHER = 0.4
#: How often a value changes to any other instead of to the next one.
_ANY_VALUE = 0.25


class Candidate(msgspec.Struct, frozen=True):
    """A policy as tables, and the preset's name if it is one."""

    table: Table
    preset: str = ""

    @property
    def key(self) -> str:
        """What identifies it: the tables as text, in a fixed order."""
        return msgspec.json.encode(self.table, order="sorted").decode()

    @property
    def name(self) -> str:
        return self.preset or ", ".join(_said(self.table)) or "the defaults"

    @property
    def departures(self) -> int:
        """How many of its keys differ from the default; 0 for baselines, which are well known."""
        return 0 if self.preset in BASELINES else len(_departures(self.table))

    def policy(self) -> PolicyFile:
        return config.parse_policy(self.preset or "candidate", self.table)


def presets(setting: Setting) -> list[Candidate]:
    """The baselines, then the other shipped presets that can keep the user's bound on staleness.

    A wider bound of a preset is narrowed, but not to 0: it lives by staleness. What has no effect
    in the setting does no harm: a preset is tried for the rest of it.
    """
    shipped = config.shipped("policies/presets")
    baselines = [name for name in BASELINES if name in shipped]
    found = []
    for name in [*baselines, *(name for name in shipped if name not in BASELINES)]:
        table = _preset(name)
        candidate = Candidate(_narrowed(table, setting), name)
        if name in BASELINES or (_bounded(table, setting) and _buildable(candidate)):
            found.append(candidate)
    return found


def starts(setting: Setting, rng: random.Random) -> list[Candidate]:
    """Further starting points of the search: policies known to be good, completed."""
    narrowed = [_narrowed(table, setting) for table in space.STARTS]
    fitting = [table for table in narrowed if _inside(table, setting)]
    completed = [Candidate(_mended(table, setting, rng)) for table in fitting]
    return [one for one in completed if _buildable(one)]


def draw(setting: Setting, rng: random.Random) -> Candidate:
    """Any policy of the space; half of the roles get the plainest."""

    def make() -> Candidate:
        table: dict[str, dict[str, Any]] = {}
        for role in space.SPACE:
            plain = rng.random() < _PLAIN
            table[role] = _draw_role(role, setting, table, rng, plain=plain)
        return Candidate(table)

    return _first_buildable(make)


def neighbour(of: Candidate, setting: Setting, rng: random.Random) -> Candidate:
    """The policy with one or two changed keys: the next value of a parameter, or another policy of
    a role.

    Keys that no longer fit are drawn again.
    """

    def make() -> Candidate:
        table = _mended(of.table, setting, rng)
        while True:
            _change(table, setting, rng)
            table = _mended(table, setting, rng)
            if rng.random() >= _AND_ANOTHER:
                return Candidate(table)

    return _first_buildable(make)


def cross(one: Candidate, other: Candidate, setting: Setting, rng: random.Random) -> Candidate:
    """Takes each role from one of the two."""

    def make() -> Candidate:
        tables = [_mended(parent.table, setting, rng) for parent in (one, other)]
        mixed = {role: rng.choice(tables)[role] for role in space.SPACE}
        return Candidate(_mended(mixed, setting, rng))

    return _first_buildable(make)


def _first_buildable(make: Callable[[], Candidate]) -> Candidate:
    """Some parameters exclude each other; building the policy finds out."""
    while True:
        candidate = make()
        if _buildable(candidate):
            return candidate


def _preset(name: str) -> dict[str, dict[str, Any]]:
    return roles_of(config.read_toml(name, "policies/presets", "policy")[1])


def roles_of(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Only the roles of a policy's tables, each with its class."""
    roles = {role: dict(row) for role, row in table.items() if role in config.REGISTRY}
    for role, row in roles.items():
        row.setdefault("use", config.DEFAULTS[role])
    return roles


def _bounded(table: Table, setting: Setting) -> bool:
    """Whether it bounds the staleness of every sample, and at 0 only if it always does."""
    freshness = table.get("freshness", {})
    if freshness.get("use", config.DEFAULTS["freshness"]) != "bounded":
        return False
    return setting.max_staleness >= 1 or not freshness.get("max_staleness", 0)


def _narrowed(table: Table, setting: Setting) -> dict[str, dict[str, Any]]:
    """A copy with staleness limited to what the user allows."""
    copy = {role: dict(row) for role, row in table.items()}
    freshness = copy.get("freshness", {})
    if freshness.get("max_staleness", 0) > setting.max_staleness:
        freshness["max_staleness"] = setting.max_staleness
    return copy


def _inside(table: Table, setting: Setting) -> bool:
    chosen: dict[str, dict[str, Any]] = {}
    for role in space.SPACE:
        use = table.get(role, {}).get("use", config.DEFAULTS[role])
        if use not in {option.use for option in space.options(role, setting, chosen)}:
            return False
        chosen[role] = {"use": use}
    return True


def _buildable(candidate: Candidate) -> bool:
    try:
        candidate.policy().build()
    except ConfigError:
        return False
    return True


def _draw_role(
    role: str, setting: Setting, table: Table, rng: random.Random, *, plain: bool = False
) -> dict[str, Any]:
    """A policy that fits the roles before it, with values; if `plain` the first one that fits, with
    its defaults."""
    fitting = space.options(role, setting, table)
    option = fitting[0] if plain else rng.choice(fitting)
    keys = option.keys(setting)
    defaults = _defaults(role, option.use) if plain else {}
    values = {
        key: defaults[key] if key in defaults and defaults[key] in values else rng.choice(values)
        for key, values in keys.items()
    }
    return {"use": option.use, **values}


def _mended(table: Table, setting: Setting, rng: random.Random) -> dict[str, dict[str, Any]]:
    """A copy inside the space: every role and every parameter is set, and nothing else."""
    mended: dict[str, dict[str, Any]] = {}
    for role in space.SPACE:
        row = {"use": config.DEFAULTS[role], **table.get(role, {})}
        fitting = {option.use: option for option in space.options(role, setting, mended)}
        if row["use"] not in fitting:
            mended[role] = _draw_role(role, setting, mended, rng)
            continue
        defaults = _defaults(role, row["use"])
        said = {
            key: _stated(row.get(key), values, defaults.get(key))
            for key, values in fitting[row["use"]].keys(setting).items()
        }
        mended[role] = {"use": row["use"], **said}
    return mended


def _stated(value: Any, values: list[Any], default: Any) -> Any:
    """The value if allowed: any number is, but a word must be among `values`."""
    if value is not None and (value in values or not isinstance(value, str)):
        return value
    return default if default in values else values[0]


def _change(table: dict[str, dict[str, Any]], setting: Setting, rng: random.Random) -> None:
    """Change one key of a complete table."""
    (role,) = rng.choices(list(table), [space.WEIGHTS.get(role, 1) for role in table])
    key = rng.choice(list(table[role]))
    before = {name: table[name] for name in list(space.SPACE)[: list(space.SPACE).index(role)]}
    options = {option.use: option for option in space.options(role, setting, before)}
    if key == "use":
        others = [use for use in options if use != table[role]["use"]]
        if others:
            use = rng.choice(others)
            drawn = {k: rng.choice(v) for k, v in options[use].keys(setting).items()}
            table[role] = {"use": use, **drawn}
        return
    values = options[table[role]["use"]].keys(setting)[key]
    table[role] = {**table[role], key: _other_value(table[role][key], values, rng)}


def _other_value(value: Any, values: list[Any], rng: random.Random) -> Any:
    others = [other for other in values if other != value]
    if not others:
        return value
    if value not in values or rng.random() < _ANY_VALUE:
        return rng.choice(others)
    at = values.index(value)
    return rng.choice(values[max(0, at - 1) : at] + values[at + 1 : at + 2])


@cache
def _defaults(role: str, use: str) -> dict[str, Any]:
    """The default parameters of a policy."""
    fields = msgspec.structs.fields(config.REGISTRY[role][use])
    return {field.name: field.default for field in fields if not field.required}


def _departures(table: Table) -> list[tuple[str, str, Any]]:
    """(role, key, value) of what differs from the default."""
    found: list[tuple[str, str, Any]] = []
    for role in space.SPACE:
        row: Mapping[str, Any] = table.get(role, {})
        use = row.get("use", config.DEFAULTS[role])
        if use != config.DEFAULTS[role]:
            found.append((role, "use", use))
        defaults = _defaults(role, use)
        found += [(role, k, v) for k, v in row.items() if k != "use" and v != defaults.get(k)]
    return found


def _said(table: Table) -> list[str]:
    """The departures in short form: `tail_batching over_prompts=1.5`."""
    words: dict[str, list[str]] = {}
    for role, key, value in _departures(table):
        row = words.setdefault(role, [])
        row.append(
            str(value)
            if key == "use"
            else f"{key}={value:g}"
            if isinstance(value, float)
            else f"{key}={value}"
        )
    return [
        " ".join(row if table[role]["use"] != config.DEFAULTS[role] else [table[role]["use"], *row])
        for role, row in words.items()
    ]
