"""`rollout-sched policy`: lists policies by family, shows their files, checks them."""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from rollout_sched.config import (
    PROSE,
    REGISTRY,
    SUPPLIED,
    PolicyFile,
    load_policy,
    named_code,
    parse_policy,
    read_policy,
    shipped,
)
from rollout_sched.core.model.records import MAX_SIZE

_PRESETS = "policies/presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)
    verbs = parser.add_subparsers(metavar="VERB")

    def verb(name: str, about: str, run: Any, example: str = "") -> argparse.ArgumentParser:
        line = f"example: rollout-sched policy {name} {example}".rstrip()
        parser = verbs.add_parser(name, help=about, epilog=line)
        parser.set_defaults(run=run)
        if example:
            parser.add_argument("policy", metavar="NAME_OR_TOML", help="a preset or a file")
        return parser

    verb("list", "the shipped policies by family, with their staleness; the default verb", _list)
    verb("show", "print a policy's file", _show, "best_async")
    check = verb("check", "is it valid, and which values are in effect", _check, "mine.toml")
    check.add_argument(
        "--allow-code", action="store_true", help="import and check the classes that the file names"
    )


def _list(options: argparse.Namespace) -> None:
    batchings = list(REGISTRY["batching"].values())

    def family(policy: PolicyFile) -> tuple[int, float]:
        return batchings.index(policy.roles["batching"][0]), _bound(policy)

    policies = sorted((load_policy(name) for name in shipped(_PRESETS)), key=family)
    for of, members in groupby(policies, key=lambda policy: policy.roles["batching"][0]):
        print(of.__doc__.splitlines()[0])
        for policy in members:
            print(f"  {policy.name:24s} staleness {_staleness(policy):9s} {policy.about}")


def _bound(policy: PolicyFile) -> float:
    """The versions that a delivered sample may be behind; infinite if only its kin are bounded."""
    newest = MAX_SIZE
    oldest = policy.build(lengths=_no_lengths).freshness.oldest_allowed(newest)
    return newest - oldest if oldest > 0 else math.inf


def _staleness(policy: PolicyFile) -> str:
    bound = _bound(policy)
    return "no bound" if bound == math.inf else f"<= {bound}" if bound else "0"


def _no_lengths(group: str, index: int) -> int:
    return 0


def _show(options: argparse.Namespace) -> None:
    if options.policy in shipped(_PRESETS):
        text = (files("rollout_sched") / _PRESETS / f"{options.policy}.toml").read_text()
    else:
        read_policy(options.policy, allow_code=True)  # which says what is wrong
        text = Path(options.policy).read_text()
    print(text.rstrip())


def _check(options: argparse.Namespace) -> None:
    from rollout_sched.live import settings_of  # slow to import; the list does not need it
    from rollout_sched.live.trainer import reward_settings_of

    name, table = read_policy(options.policy, allow_code=True)
    skipped = [] if options.allow_code else named_code(table)
    for path, _ in skipped:
        table.pop(path.partition(".")[0], None)
    policy = parse_policy(name, table)
    policy.build(lengths=_no_lengths)
    settings_of(policy)
    reward_settings_of(policy)
    if skipped:
        named = ", ".join(f"{path} {use}" for path, use in skipped)
        print(f"not checked, because it is code (see --allow-code): {named}")
    print(f"{options.policy}: valid; staleness {_staleness(policy)}; in effect:")
    for line in _in_effect(policy):
        print(line)
    for key in PROSE:
        if getattr(policy, key):
            print(f"{key}: {getattr(policy, key)}")


def _in_effect(policy: PolicyFile) -> Iterator[str]:
    """Each role with what it uses, and the value of each key, in the file or by default."""
    for role, (cls, given) in policy.roles.items():
        use = next((name for name, known in REGISTRY[role].items() if known is cls), cls.__name__)
        values = [
            f"{name} = {json.dumps(given.get(name, parameter.default), default=str)}"
            for name, parameter in inspect.signature(cls).parameters.items()
            if name not in SUPPLIED
        ]
        yield f"  {role}: {use}" + (f" ({', '.join(values)})" if values else "")
    for table in ("live", "rewards"):
        for key, value in getattr(policy, table).items():
            yield f"  {table}: {key} = {json.dumps(value)}"
