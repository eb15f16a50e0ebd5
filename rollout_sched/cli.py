"""The command line: each of its commands, and those that only show what is shipped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from rollout_sched import __version__, config, retuner
from rollout_sched.argument_types import natural, positive
from rollout_sched.calibration import command as calibrate
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.inspection import command as inspection
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.live.live_scheduler import settings_of
from rollout_sched.live.reward_function import reward_settings_of
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.settings import Settings
from rollout_sched.log_lines import Format, Level
from rollout_sched.simulators.fake_instance import command as fake_instance
from rollout_sched.simulators.guess import command as guess
from rollout_sched.simulators.replay import command as replay
from rollout_sched.simulators.traces import TraceError
from rollout_sched.simulators.traces import command as trace
from rollout_sched.simulators.tune import command as tune
from rollout_sched.store import command as store
from rollout_sched.struct_flags import add_flags, given_flags
from rollout_sched.top import command as top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 for input that cannot be used, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        return 130
    except (RolloutError, TraceError, OSError) as error:
        print(f"rollout-sched: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-sched", description="Rollout scheduling for RL post-training on vLLM fleets."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay.add(commands)
    tune.add(commands)
    inspection.add(commands)
    _add_serve(commands)
    top.add(commands)
    fake_instance.add(commands)
    _add_demo(commands)

    check = commands.add_parser("check", help="say whether a policy file is valid, and if not, why")
    check.add_argument("policy", metavar="POLICY", help="a TOML file, or the name of a preset")
    check.set_defaults(run=_check)

    commands.add_parser("policies", help="the policies that are shipped").set_defaults(
        run=_list_policies
    )
    guess.add(commands)
    calibrate.add(commands)

    store.add(commands)
    trace.add(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible gateway to a fleet of vLLM",
        argument_default=argparse.SUPPRESS,  # what is not given is for Options to say
    )
    defaults = {field.name: field.default for field in msgspec.structs.fields(Options)}
    add = parser.add_argument
    add("--policy", required=True, metavar="NAME_OR_TOML", help="a preset or a file")
    add(
        "--instance",
        action="append",
        dest="instances",
        metavar="URL",
        help="a vLLM server; repeat for each. One that is not up yet joins later",
    )
    add(
        "--endpoints",
        type=Path,
        metavar="FILE",
        help="a file that names them, in llm-d's format; what is changed there is followed",
    )
    add("--host", help=f"default: {defaults['host']}")
    add("--port", type=_port, help=f"default: {defaults['port']}; 0 picks a free one")
    add("--api-key-file", type=Path, metavar="FILE", help="clients' keys, one on each line")
    add("--trainer-key-file", type=Path, metavar="FILE", help="trainers', who may do more")
    add("--admin-key-file", type=Path, metavar="FILE", help="administrators', who may do all")
    add("--admin-socket", type=Path, metavar="PATH", help="a Unix socket for these, in their place")
    add(
        "--instance-api-key-file",
        type=Path,
        metavar="FILE",
        help="vLLM's own --api-key: KEY for the instances named here, URL KEY for one of them",
    )
    add(
        "--allow-instance",
        action="append",
        dest="allow_instances",
        metavar="PATTERN",
        help="URLs that may be added later, as http://10.0.0.*:8000; repeatable (default: any)",
    )
    add(
        "--weights-root",
        action="append",
        dest="weights_roots",
        type=Path,
        metavar="DIR",
        help="weights that are named by path must lie in it; repeatable (default: anywhere)",
    )
    unknown = "where vLLM does not tell them"
    add("--instance-slots", type=positive, dest="slots", metavar="N", help=unknown)
    add("--instance-kv-tokens", type=positive, dest="kv_tokens", metavar="N", help=unknown)
    add("--max-requests", type=positive, metavar="N", help=f"default: {defaults['max_requests']}")
    megabytes = defaults["max_body"] // 2**20
    add("--max-body", type=_megabytes, metavar="MB", help=f"default: {megabytes}")
    add("--max-samples", type=positive, metavar="N", help="of the trainer's that may be here")
    stopping = f"for what runs when it stops (default: {defaults['grace_s']:g})"
    add("--grace-s", type=natural, metavar="SECONDS", help=stopping)
    add("--log-level", choices=get_args(Level), help=f"default: {defaults['log_level']}")
    add("--log-format", choices=get_args(Format), help=f"default: {defaults['log_format']}")
    add("--otlp", metavar="URL", help="of a collector for traces, as http://127.0.0.1:4318")
    add("--access-log", action="store_true", help="log each call when it is over")
    retuner.add_flags(parser)
    add_flags(parser, RunOptions)
    add_flags(
        parser.add_argument_group("patience", "each also a key of the policy file's [live] table"),
        Settings,
    )
    parser.set_defaults(run=_serve)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="a rollout, live, with a trainer loop and a summary")
    add = parser.add_argument
    add("--policy", action="append", dest="policies", metavar="NAME_OR_TOML", help="repeatable")
    add(
        "--instance",
        action="append",
        dest="instances",
        default=[],
        metavar="URL",
        help="a vLLM server; repeat for each. Without: two simulated ones",
    )
    add("--weights", default="", metavar="PATH", help="checkpoint to load, {version} in its path")
    add("--speed", type=float, default=30.0, metavar="X", help="of the simulated instances")
    parser.set_defaults(run=_demo)


def _port(text: str) -> int:
    port = natural(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; the highest is 65535")
    return port


def _megabytes(text: str) -> int:
    return positive(text) * 2**20


def _demo(options: argparse.Namespace) -> None:
    from rollout_sched import demo

    demo.demo(
        demo.Options(
            policies=options.policies or demo.POLICIES,
            instances=options.instances,
            weights=options.weights,
            speed=options.speed,
        )
    )


def _serve(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.gateway.serve import serve

    names = (field.name for field in msgspec.structs.fields(Options))
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    live = given_flags(options, Settings)
    given = {**given, **given_flags(options, RunOptions)}
    if not (given.get("instances") or given.get("endpoints")):
        raise CallerError("no instance is named: give --instance URL, or --endpoints FILE")
    serve(Options(**given, live=live), retuner.attachment(options))


def _check(options: argparse.Namespace) -> None:
    policy = config.load_policy(options.policy)
    policy.build(lengths=lambda group, index: 0)
    settings_of(policy)
    reward_settings_of(policy)
    roles = ", ".join(f"{role} {cls.__name__}" for role, (cls, _) in policy.roles.items())
    print(f"{options.policy}: valid ({roles})")
    for key in config.PROSE:
        if getattr(policy, key):
            print(f"{key}: {getattr(policy, key)}")


def _list_policies(options: argparse.Namespace) -> None:
    _print_list(
        (name, config.load_policy(name).about) for name in config.shipped("policies/presets")
    )


def _print_list(rows: Iterable[tuple[str, str]]) -> None:
    for name, about in rows:
        print(f"{name:32s} {about}")
