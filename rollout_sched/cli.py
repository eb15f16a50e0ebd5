"""The command line: the entry point, and the commands that only show what is shipped."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from rollout_sched import __version__, config
from rollout_sched.calibration import command as calibrate
from rollout_sched.core.model.errors import CallerError, RolloutError
from rollout_sched.inspection import command as inspection
from rollout_sched.integrations.gateway import options as flags
from rollout_sched.integrations.ray import command as ray
from rollout_sched.live import settings_of
from rollout_sched.live.trainer import reward_settings_of
from rollout_sched.simulators.fake_instance import command as fake_instance
from rollout_sched.simulators.guess import command as guess
from rollout_sched.simulators.replay import command as replay
from rollout_sched.simulators.traces import TraceError
from rollout_sched.simulators.traces import command as trace
from rollout_sched.simulators.tune import command as tune
from rollout_sched.store import salvage as store
from rollout_sched.top import command as top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: 0 on success, 2 for unusable input, 130 if interrupted, 141 if the reader of its output
    has gone: the exit codes of a shell.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _write_to_nowhere()
        return 141
    except (RolloutError, TraceError, OSError) as error:
        print(f"rollout-sched: {error}", file=sys.stderr)
        return 2
    return 0


def _write_to_nowhere() -> None:
    """Send standard output nowhere from now on, so that its flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    ray.add(commands)
    top.add(commands)
    fake_instance.add(commands)
    _add_demo(commands)

    check = commands.add_parser("check", help="say whether a policy file is valid, and if not, why")
    check.add_argument("policy", metavar="POLICY", help="a TOML file, or the name of a preset")
    check.set_defaults(run=_check)

    commands.add_parser("policies", help="list the shipped policies").set_defaults(
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
        argument_default=argparse.SUPPRESS,  # Options has the defaults
    )
    flags.add_gateway_flags(parser)
    parser.set_defaults(run=_serve)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("demo", help="a live rollout, with a trainer loop and a summary")
    add = parser.add_argument
    add("--policy", action="append", dest="policies", metavar="NAME_OR_TOML", help="repeatable")
    add(
        "--instance",
        action="append",
        dest="instances",
        default=[],
        metavar="URL",
        help="URL of a vLLM server; repeatable (default: two simulated servers)",
    )
    add("--weights", default="", metavar="PATH", help="checkpoint to load, {version} in its path")
    add("--speed", type=float, default=30.0, metavar="X", help="speed of the simulated instances")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    from rollout_sched import demo

    demo.demo(
        demo.DemoOptions(
            policies=options.policies or demo.POLICIES,
            instances=options.instances,
            weights=options.weights,
            speed=options.speed,
        )
    )


def _serve(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.gateway.serve import serve

    given = flags.given_options(options)
    if not (given.instances or given.endpoints):
        raise CallerError("no instance is named: use --instance URL or --endpoints FILE")
    serve(given)


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
