"""The options of `rollout-sched serve`, with their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import msgspec

from rollout_sched.flags import add_flags, given_flags, natural, positive
from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.integrations.http import MAX_BODY
from rollout_sched.live import RunOptions, Settings
from rollout_sched.process import Format, Level


class Options(RunOptions, frozen=True, kw_only=True):
    """Every file is read, and every error is raised, before the port is opened.

    policy, instances  a preset or a TOML file; URLs of vLLM servers
    endpoints          a file that lists instances; it is watched for changes (`endpoints_file`)
    max_requests       responses that may be open at once, waiting or running
    max_body           bytes of one request's body
    max_bodies         bytes of all bodies that are held at once
    max_samples        samples of the trainer's API that may be open at once
    slots, kv_tokens   requests that an instance runs at once and the size of its KV cache, used
                       where the instance does not report them
    api_key_file, trainer_key_file, admin_key_file
                       keys of clients, trainers and administrators; None: no key needed
    weights_roots      folders in which weights on disk must lie; empty: anywhere
    allow_instances    patterns of URLs that may be added while it runs; empty: any URL
    log_level          the lowest level that is logged: debug, info, warning, error
    log_format         text or json, one line per record; with json, printed lines are logged too
    access_log         log a line for each call that ends
    otlp               URL of an OpenTelemetry collector (HTTP) that receives traces
    grace_s            seconds that running responses get to finish when the gateway stops
    live               settings of the driver; they override those of the policy file
    """

    policy: str
    instances: list[str] = msgspec.field(default_factory=list)
    endpoints: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    trainer_key_file: Path | None = None
    admin_key_file: Path | None = None
    admin_socket: Path | None = None
    weights_roots: list[Path] = msgspec.field(default_factory=list)
    allow_instances: list[str] = msgspec.field(default_factory=list)
    instance_api_key_file: Path | None = None
    max_requests: int = Limits().requests
    max_body: int = MAX_BODY
    max_bodies: int = Limits().body_bytes
    max_samples: int = 3_200_000  # twice 100,000 groups of 16
    slots: int | None = None
    kv_tokens: int | None = None
    log_level: Level = "info"
    log_format: Format = "text"
    access_log: bool = False
    otlp: str = ""
    grace_s: float = 10.0
    live: dict[str, Any] = msgspec.field(default_factory=dict)


# ------------------------------------------------------------------------------------------
# The command-line flags of a gateway, for every command that starts one.

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Options)}


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser that suppresses defaults: Options has the defaults."""
    parser.add_argument(
        "--policy", required=True, metavar="NAME_OR_TOML", help="a preset or a file"
    )
    _add_address_flags(parser.add_argument_group("address"))
    _add_fleet_flags(parser.add_argument_group("fleet"))
    _add_key_flags(parser.add_argument_group("keys", "each file has one key per line"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_log_flags(parser.add_argument_group("logs"))
    add_flags(parser.add_argument_group("run"), RunOptions)
    add_flags(
        parser.add_argument_group("patience", "each also a key of the policy file's [live] table"),
        Settings,
    )


def _add_address_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", help=_default("host"))
    add("--port", type=port_number, help=f"{_default('port')}; 0 picks a free one")


def _add_fleet_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--instance",
        action="append",
        dest="instances",
        metavar="URL",
        help="a vLLM server; repeat for each. A server that is not up yet joins later",
    )
    add(
        "--endpoints",
        type=Path,
        metavar="FILE",
        help="a file that lists the instances, in llm-d's format; it is watched for changes",
    )
    add(
        "--allow-instance",
        action="append",
        dest="allow_instances",
        metavar="PATTERN",
        help="URLs that may be added later, e.g. http://10.0.0.*:8000; repeatable (default: any)",
    )
    unknown = "used where vLLM does not report it"
    add("--instance-slots", type=positive, dest="slots", metavar="N", help=unknown)
    add("--instance-kv-tokens", type=positive, dest="kv_tokens", metavar="N", help=unknown)
    add(
        "--weights-root",
        action="append",
        dest="weights_roots",
        type=Path,
        metavar="DIR",
        help="weights given by path must lie in this folder; repeatable (default: anywhere)",
    )


def _add_key_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key-file", type=Path, metavar="FILE", help="clients' keys")
    add("--trainer-key-file", type=Path, metavar="FILE", help="trainers' keys, for more routes")
    add("--admin-key-file", type=Path, metavar="FILE", help="administrators' keys, for all routes")
    add("--admin-socket", type=Path, metavar="PATH", help="a Unix socket that needs no key")
    add(
        "--instance-api-key-file",
        type=Path,
        metavar="FILE",
        help="vLLM's own --api-key: KEY for the instances given here, URL KEY for one of them",
    )


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-requests", type=positive, metavar="N", help=_default("max_requests"))
    megabytes = _DEFAULTS["max_body"] // 2**20
    add("--max-body", type=_megabytes, metavar="MB", help=f"default: {megabytes}")
    add("--max-samples", type=positive, metavar="N", help="samples of trainers held at once")
    stopping = f"for running requests when it stops (default: {_DEFAULTS['grace_s']:g})"
    add("--grace-s", type=natural, metavar="SECONDS", help=stopping)


def _add_log_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--log-level", choices=get_args(Level), help=_default("log_level"))
    add("--log-format", choices=get_args(Format), help=_default("log_format"))
    add("--access-log", action="store_true", help="log each call when it ends")
    add("--otlp", metavar="URL", help="collector for traces, e.g. http://127.0.0.1:4318")


def given_options(namespace: argparse.Namespace) -> Options:
    """The options that the flags give."""
    names = (field.name for field in msgspec.structs.fields(Options))
    given = {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
    live = given_flags(namespace, Settings)
    return Options(**{**given, **given_flags(namespace, RunOptions)}, live=live)


def _default(name: str) -> str:
    return f"default: {_DEFAULTS[name]}"


def port_number(text: str) -> int:
    """A TCP port. Raises argparse.ArgumentTypeError."""
    port = natural(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; the highest is 65535")
    return port


def _megabytes(text: str) -> int:
    return positive(text) * 2**20
