"""The commands `rollout-sched ray up`, `status` and `down`."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.flags import add_flags, given_flags
from rollout_sched.integrations.gateway.options import add_gateway_flags, given_options
from rollout_sched.integrations.ray.deployment import Deployment

#: The fields of a deployment that are flags of `up`, besides its name.
_UP = (
    "fronts",
    "shared_store",
    "scheduler_port",
    "front_cpus",
    "servers",
    "serve_apps",
    "server_method",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    up = kinds.add_parser(
        "up",
        help="start a deployment; it keeps running",
        argument_default=argparse.SUPPRESS,
        epilog="example: rollout-sched ray up --policy best_async --servers 'vllm-*'",
    )
    _common(up)
    add_flags(up, Deployment, _UP)
    add_gateway_flags(up)
    up.set_defaults(run=_up)
    for name, run, about in (
        ("status", _status, "print the URLs of the scheduler and its fronts"),
        ("down", _down, "stop a deployment; its store is kept"),
    ):
        example = f"example: rollout-sched ray {name} --name rollouts"
        kind = kinds.add_parser(
            name, help=about, argument_default=argparse.SUPPRESS, epilog=example
        )
        _common(kind)
        kind.set_defaults(run=run)


def _common(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Deployment, ["name"])
    parser.add_argument("--address", help="address of the cluster; default: that of this machine")


def _up(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    _tell(
        asyncio.run(
            cluster.start(given_options(options), Deployment(**given_flags(options, Deployment)))
        )
    )


def _status(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    deployment = Deployment(**given_flags(options, Deployment))

    async def look() -> Any:
        actor = await cluster.found(deployment)
        if actor is None:
            raise CallerError(f"no deployment {deployment.name!r} on this cluster")
        return await cluster.facts(actor)

    _tell(asyncio.run(look()))


def _down(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    deployment = Deployment(**given_flags(options, Deployment))
    if not asyncio.run(cluster.stop(deployment)):
        raise CallerError(f"no deployment {deployment.name!r} on this cluster")
    print(f"deployment {deployment.name} has stopped")


def _tell(facts: Any) -> None:
    print(f"scheduler: {facts.url}")
    for name, url in sorted(facts.fronts.items()):
        print(f"{name}: {url}")
