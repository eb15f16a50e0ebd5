"""The commands `rollout-sched ray up`, `status` and `down`."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from rollout_sched.argument_types import natural
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.flags import add_gateway_flags, given_options, port_number
from rollout_sched.integrations.ray.deployment import NAME, Deployment, FrontCount


def add(commands: Any) -> None:
    """The commands and their options, for an argparse parser of commands."""
    parser = commands.add_parser("ray", help="a scheduler and its fronts on a Ray cluster")
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    up = kinds.add_parser(
        "up",
        help="start them, and leave them running",
        argument_default=argparse.SUPPRESS,
    )
    _common(up)
    add = up.add_argument
    add("--fronts", type=_fronts, metavar="per-node|N", help="default: per-node")
    add(
        "--shared-store",
        action="store_true",
        help="every node has the folder --store, so the scheduler may go on at another",
    )
    add(
        "--scheduler-port",
        type=port_number,
        metavar="PORT",
        help="of the control plane; --port is that of the fronts (default: any)",
    )
    add("--front-cpus", type=natural, metavar="N", help="cores that Ray keeps for each front")
    add(
        "--servers",
        metavar="PATTERN",
        help="named actors that are vLLM servers, as 'vllm-*': they join when they appear",
    )
    add(
        "--serve-apps",
        metavar="PATTERN",
        help="Ray Serve applications, or APPLICATION/DEPLOYMENT, whose replicas are vLLM servers: "
        "each joins by its own address",
    )
    add(
        "--server-method",
        metavar="NAME",
        help="their method that tells the URL, or (address, port); default: url",
    )
    add_gateway_flags(up)
    up.set_defaults(run=_up)
    for name, run, about in (
        ("status", _status, "where they are"),
        ("down", _down, "stop them; the store stays"),
    ):
        kind = kinds.add_parser(name, help=about, argument_default=argparse.SUPPRESS)
        _common(kind)
        kind.set_defaults(run=run)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help=f"of the deployment; default: {NAME}")
    parser.add_argument("--address", help="of the cluster; default: that of this machine")


def _fronts(text: str) -> FrontCount:
    return "per-node" if text == "per-node" else natural(text)


def _deployment(options: argparse.Namespace) -> Deployment:
    names = Deployment.__struct_fields__
    return Deployment(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def _up(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    _tell(asyncio.run(cluster.start(given_options(options), _deployment(options))))


def _status(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    deployment = _deployment(options)

    async def look() -> Any:
        actor = await cluster.found(deployment)
        if actor is None:
            raise CallerError(f"no deployment {deployment.name!r} is on this cluster")
        return await cluster.facts(actor)

    _tell(asyncio.run(look()))


def _down(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    deployment = _deployment(options)
    if not asyncio.run(cluster.stop(deployment)):
        raise CallerError(f"no deployment {deployment.name!r} is on this cluster")
    print(f"deployment {deployment.name} has stopped")


def _tell(facts: Any) -> None:
    print(f"scheduler: {facts.url}")
    for name, url in sorted(facts.fronts.items()):
        print(f"{name}: {url}")
