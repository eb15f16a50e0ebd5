"""The commands `rollout-sched ray up`, `status` and `down`."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from rollout_sched.core.model.errors import CallerError
from rollout_sched.flags import natural
from rollout_sched.integrations.gateway.options import add_gateway_flags, given_options, port_number
from rollout_sched.integrations.ray.deployment import NAME, Deployment, FrontCount


def add(commands: Any) -> None:
    """Add the commands and their options to an argparse parser of commands."""
    parser = commands.add_parser("ray", help="run a scheduler and its fronts on a Ray cluster")
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    up = kinds.add_parser(
        "up",
        help="start a deployment; it keeps running",
        argument_default=argparse.SUPPRESS,
    )
    _common(up)
    add = up.add_argument
    add("--fronts", type=_fronts, metavar="per-node|N", help="number of fronts; default: per-node")
    add(
        "--shared-store",
        action="store_true",
        help="every node can open the folder --store, so the scheduler may restart on another node",
    )
    add(
        "--scheduler-port",
        type=port_number,
        metavar="PORT",
        help="port of the control plane; --port is the port of the fronts (default: any)",
    )
    add("--front-cpus", type=natural, metavar="N", help="cores that Ray reserves for each front")
    add(
        "--servers",
        metavar="PATTERN",
        help="pattern of named actors that are vLLM servers, such as 'vllm-*'; each joins when it "
        "appears",
    )
    add(
        "--serve-apps",
        metavar="PATTERN",
        help="pattern of Ray Serve applications, or APPLICATION/DEPLOYMENT, whose replicas are "
        "vLLM servers; each joins with its own address",
    )
    add(
        "--server-method",
        metavar="NAME",
        help="method of these actors that returns the URL or (address, port); default: url",
    )
    add_gateway_flags(up)
    up.set_defaults(run=_up)
    for name, run, about in (
        ("status", _status, "print the URLs of the scheduler and its fronts"),
        ("down", _down, "stop a deployment; its store is kept"),
    ):
        kind = kinds.add_parser(name, help=about, argument_default=argparse.SUPPRESS)
        _common(kind)
        kind.set_defaults(run=run)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help=f"name of the deployment; default: {NAME}")
    parser.add_argument("--address", help="address of the cluster; default: that of this machine")


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
            raise CallerError(f"no deployment {deployment.name!r} on this cluster")
        return await cluster.facts(actor)

    _tell(asyncio.run(look()))


def _down(options: argparse.Namespace) -> None:
    from rollout_sched.integrations.ray import cluster

    cluster.connect(getattr(options, "address", None))
    deployment = _deployment(options)
    if not asyncio.run(cluster.stop(deployment)):
        raise CallerError(f"no deployment {deployment.name!r} on this cluster")
    print(f"deployment {deployment.name} has stopped")


def _tell(facts: Any) -> None:
    print(f"scheduler: {facts.url}")
    for name, url in sorted(facts.fronts.items()):
        print(f"{name}: {url}")
