"""Policy files: reads a TOML file, reports errors in it, and builds a scheduler from it.

A policy file has one table per role; `use` names the policy, the other keys are its parameters. A
role that is left out gets its default. `use = "package.module:Class"` takes a class of the user's
own; its constructor's parameters become the keys of the table. Such a file is code: it is used only
if the user says that it may run.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.policies import (
    admission,
    affinity,
    batching,
    freshness,
    interruption,
    lending,
    migration,
    ordering,
    prediction,
    routing,
    selection,
    weights,
)

Lengths = Callable[[str, int], int]

S = TypeVar("S", bound=msgspec.Struct)

#: Largest size of a policy or a scenario file; shipped ones have 1 or 2 KB. The parser's time grows
#: with the square of the parts of a dotted key: seconds for a file of this size.
MAX_BYTES = 32 * 1024

#: A changed parameter after the name of a policy: ` role.key=value`.
_CHANGE = re.compile(r" (\w+)\.(\w+)=(\S+)$")

REGISTRY: dict[str, dict[str, Any]] = {
    "routing": {
        "group_tokens": routing.GroupTokens,
        "least_requests": routing.LeastRequests,
        "least_tokens": routing.LeastTokens,
        "length_split": routing.LengthSplit,
        "power_of_two": routing.PowerOfTwo,
        "random": routing.Random,
        "round_robin": routing.RoundRobin,
        "session_affinity": routing.SessionAffinity,
        "static_split": routing.StaticSplit,
        "vllm_internal_lb": routing.VllmInternalLb,
    },
    "affinity": {"by_cost": affinity.ByCost, "none": affinity.NoAffinity},
    "ordering": {
        "fifo": ordering.Fifo,
        "longest_first": ordering.LongestFirst,
        "resumed_first": ordering.ResumedFirst,
        "shortest_first": ordering.ShortestFirst,
    },
    "admission": {
        "aimd_concurrency": admission.AimdConcurrency,
        "kv_growth": admission.KvGrowth,
        "kv_tokens": admission.KvTokens,
        "session_cap": admission.SessionCap,
        "slots": admission.Slots,
        "unbounded": admission.Unbounded,
    },
    "prediction": {
        "group_history": prediction.GroupHistory,
        "none": prediction.NoPrediction,
        "oracle": prediction.Oracle,
        "prompt_history": prediction.PromptHistory,
    },
    "batching": {
        "fully_async": batching.FullyAsync,
        "one_step_off": batching.OneStepOff,
        "pooled": batching.Pooled,
        "sync": batching.Sync,
        "tail_batching": batching.TailBatching,
    },
    "selection": {
        "in_order": selection.InOrder,
        "like_lengths": selection.LikeLengths,
    },
    "freshness": {
        "bounded": freshness.Bounded,
        "paced": freshness.Paced,
        "unbounded": freshness.Unbounded,
    },
    "interruption": {
        "none": interruption.NoInterruption,
        "partial": interruption.Partial,
    },
    "weights": {"all_at_once": weights.AllAtOnce, "rolling": weights.Rolling},
    "migration": {
        "by_cost": migration.ByCost,
        "none": migration.NoMigration,
        "repack": migration.Repack,
    },
    "lending": {"none": lending.NoLending, "stage_fusion": lending.StageFusion},
}

DEFAULTS = {
    "routing": "least_requests",
    "affinity": "by_cost",
    "ordering": "fifo",
    "admission": "slots",
    "prediction": "none",
    "batching": "sync",
    "selection": "in_order",
    "freshness": "bounded",
    "interruption": "none",
    "weights": "all_at_once",
    "migration": "none",
    "lending": "none",
}

#: Constructor parameters that `PolicyFile.build` supplies, not the file.
SUPPLIED = ("rng", "lengths")

#: The table of settings for a live fleet, and that for the rewards of its samples.
LIVE = "live"
REWARDS = "rewards"

#: Keys beside the tables: what the policy is, its source, and how it differs from that.
PROSE = ("about", "source", "differs")


class ConfigError(CallerError):
    """A configuration file cannot be used; the text names the file, the key path and the remedy."""


class PolicyFile(msgspec.Struct, frozen=True):
    """A policy as read: checked, but not yet bound to a seed or a trace.

    `live`, `rewards`: the tables for a live fleet, which `read_table` checks; replays do not use
    them. `differs`: what the system it is named after does differently, and why. `tables`: all of
    the file.
    """

    name: str
    about: str
    source: str
    roles: dict[str, tuple[Any, dict[str, Any]]]
    live: dict[str, Any] = {}
    rewards: dict[str, Any] = {}
    differs: str = ""
    tables: dict[str, Any] = {}

    def build(self, *, seed: int = 0, lengths: Lengths | None = None) -> Roles:
        """The roles, with random numbers from `seed`. `lengths` is for the oracle, and only in
        replays.

        Raises ConfigError if the policy needs true lengths and none are given.
        """
        roles = Roles(**{role: self._role(role, seed, lengths) for role in self.roles})
        for role in (roles.batching, roles.weights):
            least = role.least_staleness
            if roles.freshness.oldest_allowed(least) > 0:
                raise ConfigError(
                    f"{self.name}: freshness.max_staleness: {type(role).__name__} makes samples "
                    f"{least} version(s) old that could not be delivered; allow at least {least}"
                )
        if isinstance(roles.freshness, freshness.Paced):
            trigger = roles.freshness.trigger_parameter_sync_step
            if (every := roles.weights.every) != trigger:
                raise ConfigError(
                    f"{self.name}: weights.every: {every}, but freshness counts from updates every "
                    f"{trigger} versions (trigger_parameter_sync_step); give both the same number"
                )
        return roles

    def scheduler(
        self,
        prompts_per_step: int,
        *,
        version: int = 0,
        seed: int = 0,
        lengths: Lengths | None = None,
    ) -> Scheduler:
        """A new scheduler that follows this policy."""
        return Scheduler(self.build(seed=seed, lengths=lengths), prompts_per_step, version=version)

    def _role(self, role: str, seed: int, lengths: Lengths | None) -> Any:
        cls, parameters = self.roles[role]
        supplied: dict[str, Any] = {}
        for need in _parameters(cls):
            if need == "rng":
                supplied[need] = random.Random(f"{seed}/{role}")
            elif need == "lengths":
                if lengths is None:
                    raise ConfigError(
                        f"{self.name}: {role}: {cls.__name__} needs the true lengths, which only a "
                        f"replay knows; use group_history for a live fleet"
                    )
                supplied[need] = lengths
        try:
            return cls(**parameters, **supplied)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: {role}: {error}") from error


def load_policy(name_or_path: str, *, allow_code: bool = False) -> PolicyFile:
    """Read a shipped policy by name or a TOML file by path, and check every key.

    Raises ConfigError that names the file and the key path, also for a file that names code of the
    user's own, unless `allow_code`.
    """
    return parse_policy(*read_policy(name_or_path, allow_code=allow_code))


def read_policy(name_or_path: str, *, allow_code: bool = False) -> tuple[str, dict[str, Any]]:
    """(name, tables) of a policy, as in `load_policy`. Changed parameters may follow the name, as
    tables show it: `best_async freshness.max_staleness=4`."""
    base, changes = name_or_path, []
    while found := _CHANGE.search(base):
        base = base[: found.start()]
        changes.append(found)
    name, table = read_toml(base, "policies/presets", "policy")
    for change in reversed(changes):
        role, key, word = change.groups()
        table[role] = {**table.get(role, {}), key: scalar(word)}
    name += name_or_path[len(base) :]
    if not allow_code:
        refuse_code(name, table)
    return name, table


def scalar(word: str) -> Any:
    """A value as in TOML, but a string without quotes."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word.replace("_", ""))
        except ValueError:
            continue
    return word


def refuse_code(name: str, table: Mapping[str, Any]) -> None:
    """Raise ConfigError if a policy's tables name code of the user's own."""
    for path, use in named_code(table):
        raise ConfigError(
            f"{name}: {path}: {use!r} is code, which runs with your rights; if you trust the file "
            f"and that module, add --allow-code (in Python: allow_code=True)"
        )


def named_code(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key path, package.module:attribute) of all that a policy's tables would import."""
    return [
        (f"{room}.{key}", use)
        for room, its_table in table.items()
        if isinstance(its_table, dict) and room != LIVE
        for key in ("use", "keep")
        if isinstance(use := its_table.get(key), str) and ":" in use
    ]


def parse_policy(name: str, table: Mapping[str, Any]) -> PolicyFile:
    """Check a policy given as nested tables, which may name code."""
    for key in table:
        if key not in REGISTRY and key not in PROSE and key not in (LIVE, REWARDS):
            raise unknown_key(name, key, [*REGISTRY, LIVE, REWARDS, *PROSE])
    for key in PROSE:
        if not isinstance(table.get(key, ""), str):
            raise ConfigError(f"{name}: {key}: expected a string")
    roles = {role: _parse_role(name, role, table.get(role, {})) for role in REGISTRY}
    live, rewards = table.get(LIVE, {}), table.get(REWARDS, {})
    if not isinstance(live, dict):
        raise ConfigError(f"{name}: {LIVE}: expected a table, as in [{LIVE}] poll_s = 1.0")
    if not isinstance(rewards, dict):
        raise ConfigError(f"{name}: {REWARDS}: expected a table, as in [{REWARDS}] tries = 3")
    return PolicyFile(
        name,
        table.get("about", ""),
        table.get("source", ""),
        roles,
        live,
        rewards,
        table.get("differs", ""),
        dict(table),
    )


def read_table(name: str, path: str, table: Mapping[str, Any], kind: type[S]) -> S:
    """A table as a struct. Raises ConfigError that names the key and the nearest known one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in hints:
            raise unknown_key(name, f"{path}.{key}", hints)
    return kind(**{k: _convert(name, f"{path}.{k}", v, hints[k]) for k, v in table.items()})


def shipped(room: str) -> list[str]:
    """The names of the TOML files in a folder of the package, such as "policies/presets"."""
    folder = files("rollout_sched").joinpath(room)
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_toml(name_or_path: str, room: str, noun: str) -> tuple[str, dict[str, Any]]:
    """(name, tables) of a shipped file by name, or of a file on disk by path."""
    if name_or_path in shipped(room):
        text = files("rollout_sched").joinpath(room, f"{name_or_path}.toml").read_text("utf-8")
        return name_or_path, tomllib.loads(text)
    path = Path(name_or_path)
    if not path.is_file():
        remedy = nearest(name_or_path, shipped(room))
        raise ConfigError(
            f"{name_or_path}: neither a file nor a shipped {noun}{remedy}; shipped are "
            f"{', '.join(shipped(room))}"
        )
    length = path.stat().st_size
    if length > MAX_BYTES:
        raise ConfigError(
            f"{name_or_path}: {length:,} bytes, but a {noun} has at most {MAX_BYTES:,}; name the "
            f"right file"
        )
    try:
        return path.stem, tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # no TOML, too long numbers, too deep nesting
        raise ConfigError(f"{name_or_path}: not valid TOML: {error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?`, or nothing if no known word is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{matches[0]}"?' if matches else ""


def unknown_key(name: str, path: str, known: Iterable[str]) -> ConfigError:
    """The error for an unknown key."""
    known = list(known)
    allowed = ", ".join(known) if known else "nothing"
    key = path.rsplit(".", 1)[-1]
    return ConfigError(f"{name}: {path}: unknown key{nearest(key, known)} (allowed: {allowed})")


def check_finite(name: str, path: str, value: Any) -> None:
    """Refuse inf and nan, which TOML allows but no setting can use."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {path} = {value}: expected a finite number")


def _parse_role(name: str, role: str, table: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(table, dict):
        raise ConfigError(f'{name}: {role}: expected a table, as in [{role}] use = "..."')
    use = table.get("use", DEFAULTS[role])
    cls = _find_class(name, role, use)
    parameters = _parameters(cls)
    known = [key for key in parameters if key not in SUPPLIED]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "use":
            continue
        if key not in known:
            raise unknown_key(name, f"{role}.{key}", ["use", *known])
        values[key] = _convert(name, f"{role}.{key}", value, parameters[key].annotation)
    for key in known:
        if parameters[key].default is inspect.Parameter.empty and key not in values:
            raise ConfigError(f"{name}: {role}.{key}: missing; {use} needs it")
    return cls, values


def _find_class(name: str, role: str, use: Any) -> Any:
    if not isinstance(use, str):
        raise ConfigError(f"{name}: {role}.use: expected a string")
    if use in REGISTRY[role]:
        return REGISTRY[role][use]
    if ":" not in use:
        raise ConfigError(
            f"{name}: {role}.use: unknown {role} {use!r}{nearest(use, REGISTRY[role])} "
            f"(allowed: {', '.join(REGISTRY[role])}, or package.module:Class)"
        )
    path = f"{name}: {role}.use"
    cls = imported(path, use, "class")
    mistakes = "; ".join(_mistakes(cls, _BASES[role]))
    if mistakes:
        raise ConfigError(f"{path}: {use!r} cannot be a {role} policy: {mistakes}")
    return cls


#: The class of each role, which its policies inherit from.
_BASES: dict[str, type[Any]] = typing.get_type_hints(Roles)


def _mistakes(cls: Any, base: type[Any]) -> Iterator[str]:
    """Says why a class of the user's own does not do for a role."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        yield f"it must inherit from {base.__name__} (from rollout_sched.core import roles)"
        return
    asked = _asked(cls)
    for name, definition in asked.items():
        answer = inspect.getattr_static(cls, name)
        if _is_abstract(answer):
            yield f"it lacks {_written(name, definition)}"
        elif inspect.isfunction(definition):
            if not _takes(cls, name, len(_arguments(definition))):
                yield f"it must have a method {_written(name, definition)}"
        elif inspect.isroutine(answer):
            yield f"{name} must be a value or a property, not a method"
    unanswered = [
        name
        for name, definition in asked.items()
        if inspect.getattr_static(cls, name) is definition and not _is_abstract(definition)
    ]
    extensions = [one for one in base.__subclasses__() if one.__module__ == base.__module__]
    for name in dir(cls):
        if name.startswith("_") or name in asked:
            continue
        for near in get_close_matches(name, unanswered, n=1, cutoff=0.8):
            yield f"nobody reads {name}; did you mean {near}?"
        for extension in extensions:
            if name in _asked(extension):
                yield f"{name} is asked only of a class that inherits from {extension.__name__}"


def _asked(cls: type) -> dict[str, Any]:
    """What the roles that a class inherits from ask for: names, and how the roles define them."""
    return {
        name: definition
        for kind in cls.__mro__
        if kind.__module__ == Roles.__module__
        for name, definition in vars(kind).items()
        if not name.startswith("_")
    }


def _is_abstract(definition: Any) -> bool:
    return getattr(definition, "__isabstractmethod__", False)


def _arguments(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


def _written(name: str, definition: Any) -> str:
    """The name of a fact, or a method as it is called."""
    if not inspect.isfunction(definition):
        return name
    return f"{name}({', '.join(_arguments(definition))})"


def _takes(cls: type, name: str, arguments: int) -> bool:
    """Whether a method can be called with that many arguments on an instance."""
    static = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    try:
        inspect.signature(getattr(cls, name)).bind(*range(arguments + (not static)))
    except TypeError:  # not callable, or with another number of arguments
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def imported(path: str, use: str, noun: str = "function") -> Any:
    """What a user names as package.module:attribute. Raises ConfigError with this key path."""
    module, _, attribute = use.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"{path}: cannot import {use!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{path}: {use!r} is {found!r}, which is not a {noun}")
    return found


@cache  # per class, because reading its annotations takes a millisecond
def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    hints = _hints(cls)
    if not isinstance(cls, type) or not issubclass(cls, msgspec.Struct):
        hints = _hints(cls.__init__) or hints
    return {
        key: parameter.replace(annotation=hints.get(key, Any))
        for key, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _hints(of: Any) -> dict[str, Any]:
    """The annotations of a class, or none if they use names that exist only for type checkers."""
    try:
        return typing.get_type_hints(of, include_extras=True)
    except (NameError, TypeError):
        return {}


def _convert(name: str, path: str, value: Any, wanted: Any) -> Any:
    check_finite(name, path, value)
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {path} = {value!r}: {error}") from error
