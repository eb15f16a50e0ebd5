"""Candidates: policies to try, taken from presets, drawn from the space, or near other ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollout_sched import config
from rollout_sched.config import ConfigError, PolicyFile
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.space import Setting, Table

#: Always among the candidates: what frameworks do, and the plain balancers.
BASELINES = ("static_split", "round_robin_sync", "dplb")
#: The one that speed is given against.
REFERENCE = "round_robin_sync"

#: How often a draw has the plainest policy of a role: most of what is odd in every role is bad.
_PLAIN = 0.5
#: How often a neighbour changes one more thing.
_AND_ANOTHER = 0.4
#: How often a value changes to any other, and not to the next.
_ANY_VALUE = 0.25


class Candidate(msgspec.Struct, frozen=True):
    """A policy as tables, and the preset's name if it is one."""

    table: Table
    preset: str = ""

    @property
    def key(self) -> str:
        """What tells it from others: the tables as text, whatever their order."""
        return msgspec.json.encode(self.table, order="sorted").decode()

    @property
    def name(self) -> str:
        return self.preset or ", ".join(_said(self.table)) or "the defaults"

    @property
    def departures(self) -> int:
        """How many of its keys say other than the default; 0 for baselines, which are known."""
        return 0 if self.preset in BASELINES else len(_departures(self.table))

    def policy(self) -> PolicyFile:
        return config.parse_policy(self.preset or "candidate", self.table)


def presets(setting: Setting) -> list[Candidate]:
    """The baselines, then the other shipped presets that can keep the user's bound on staleness.

    A bound of theirs that is wider is narrowed. One that holds what the space leaves out, or
    what the setting makes pointless, is not there unless it is a baseline.
    """
    shipped = config.shipped("policies/presets")
    baselines = [name for name in BASELINES if name in shipped]
    found = []
    for name in [*baselines, *(name for name in shipped if name not in BASELINES)]:
        candidate = _preset(name, setting)
        if name in BASELINES or (_inside(candidate.table, setting) and _buildable(candidate)):
            found.append(candidate)
    return found


def starts(setting: Setting, dice: random.Random) -> list[Candidate]:
    """Where the search starts beside the presets: what the space knows to be good, completed."""
    narrowed = [_narrowed(table, setting) for table in space.STARTS]
    fitting = [table for table in narrowed if _inside(table, setting)]
    completed = [Candidate(_mended(table, setting, dice)) for table in fitting]
    return [one for one in completed if _buildable(one)]


def draw(setting: Setting, dice: random.Random) -> Candidate:
    """Any policy of the space; in half of the roles the plainest."""

    def make() -> Candidate:
        table: dict[str, dict[str, Any]] = {}
        for role in space.SPACE:
            plain = dice.random() < _PLAIN
            table[role] = _draw_role(role, setting, table, dice, plain=plain)
        return Candidate(table)

    return _first_buildable(make)


def neighbour(of: Candidate, setting: Setting, dice: random.Random) -> Candidate:
    """The same but for a key or two: the next value of a parameter, or another policy.

    What no longer fits what was changed is drawn anew.
    """

    def make() -> Candidate:
        table = _mended(of.table, setting, dice)
        while True:
            _change(table, setting, dice)
            table = _mended(table, setting, dice)
            if dice.random() >= _AND_ANOTHER:
                return Candidate(table)

    return _first_buildable(make)


def cross(one: Candidate, other: Candidate, setting: Setting, dice: random.Random) -> Candidate:
    """Each role as one of the two has it."""

    def make() -> Candidate:
        tables = [_mended(parent.table, setting, dice) for parent in (one, other)]
        mixed = {role: dice.choice(tables)[role] for role in space.SPACE}
        return Candidate(_mended(mixed, setting, dice))

    return _first_buildable(make)


def _first_buildable(make: Callable[[], Candidate]) -> Candidate:
    """Some parameters do not go with each other; whether they do, the policies say best."""
    while True:
        candidate = make()
        if _buildable(candidate):
            return candidate


def _preset(name: str, setting: Setting) -> Candidate:
    _, table = config.read_toml(name, "policies/presets", "policy")
    roles = {role: dict(row) for role, row in table.items() if role in config.REGISTRY}
    for role, row in roles.items():
        row.setdefault("use", config.DEFAULTS[role])
    return Candidate(_narrowed(roles, setting), name)


def _narrowed(table: Table, setting: Setting) -> dict[str, dict[str, Any]]:
    """A copy that is no staler than the user allows."""
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
    role: str, setting: Setting, table: Table, dice: random.Random, *, plain: bool = False
) -> dict[str, Any]:
    """A policy that fits the roles before it, and values; if `plain` the first that does, with its
    defaults."""
    fitting = space.options(role, setting, table)
    option = fitting[0] if plain else dice.choice(fitting)
    keys = option.keys(setting)
    defaults = _defaults(role, option.use) if plain else {}
    values = {
        key: defaults[key] if key in defaults and defaults[key] in values else dice.choice(values)
        for key, values in keys.items()
    }
    return {"use": option.use, **values}


def _mended(table: Table, setting: Setting, dice: random.Random) -> dict[str, dict[str, Any]]:
    """A copy inside the space: every role answered, every parameter said, nothing else."""
    mended: dict[str, dict[str, Any]] = {}
    for role in space.SPACE:
        row = {"use": config.DEFAULTS[role], **table.get(role, {})}
        fitting = {option.use: option for option in space.options(role, setting, mended)}
        if row["use"] not in fitting:
            mended[role] = _draw_role(role, setting, mended, dice)
            continue
        defaults = _defaults(role, row["use"])
        said = {
            key: _stated(row.get(key), values, defaults.get(key))
            for key, values in fitting[row["use"]].keys(setting).items()
        }
        mended[role] = {"use": row["use"], **said}
    return mended


def _stated(value: Any, values: list[Any], default: Any) -> Any:
    """The value if it may be one: a number need not be in the table, a word must."""
    if value is not None and (value in values or not isinstance(value, str)):
        return value
    return default if default in values else values[0]


def _change(table: dict[str, dict[str, Any]], setting: Setting, dice: random.Random) -> None:
    """Change one key of a complete table."""
    (role,) = dice.choices(list(table), [space.WEIGHTS.get(role, 1) for role in table])
    key = dice.choice(list(table[role]))
    before = {name: table[name] for name in list(space.SPACE)[: list(space.SPACE).index(role)]}
    options = {option.use: option for option in space.options(role, setting, before)}
    if key == "use":
        others = [use for use in options if use != table[role]["use"]]
        if others:
            use = dice.choice(others)
            drawn = {k: dice.choice(v) for k, v in options[use].keys(setting).items()}
            table[role] = {"use": use, **drawn}
        return
    values = options[table[role]["use"]].keys(setting)[key]
    table[role] = {**table[role], key: _other_value(table[role][key], values, dice)}


def _other_value(value: Any, values: list[Any], dice: random.Random) -> Any:
    others = [other for other in values if other != value]
    if not others:
        return value
    if value not in values or dice.random() < _ANY_VALUE:
        return dice.choice(others)
    at = values.index(value)
    return dice.choice(values[max(0, at - 1) : at] + values[at + 1 : at + 2])


def _defaults(role: str, use: str) -> dict[str, Any]:
    """What the parameters of a policy are where its table does not say."""
    fields = msgspec.structs.fields(config.REGISTRY[role][use])
    return {field.name: field.default for field in fields if not field.required}


def _departures(table: Table) -> list[tuple[str, str, Any]]:
    """(role, key, value) of what is said other than the default."""
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
    """The departures in few words: `tail_batching over_prompts=1.5`."""
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
