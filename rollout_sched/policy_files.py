"""The commands `rollout-sched check` of a policy file, and `rollout-sched policies` of presets."""

from __future__ import annotations

import argparse

from rollout_sched.config import PROSE, load_policy, shipped
from rollout_sched.live import settings_of
from rollout_sched.live.trainer import reward_settings_of


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="a TOML file, or the name of a preset")
    parser.set_defaults(run=_check)


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)


def _check(options: argparse.Namespace) -> None:
    policy = load_policy(options.policy)
    policy.build(lengths=lambda group, index: 0)
    settings_of(policy)
    reward_settings_of(policy)
    roles = ", ".join(f"{role} {cls.__name__}" for role, (cls, _) in policy.roles.items())
    print(f"{options.policy}: valid ({roles})")
    for key in PROSE:
        if getattr(policy, key):
            print(f"{key}: {getattr(policy, key)}")


def _list(options: argparse.Namespace) -> None:
    for name in shipped("policies/presets"):
        print(f"{name:32s} {load_policy(name).about}")
