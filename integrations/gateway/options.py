"""The options of `rollout-sched serve`, with their defaults, and their flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_sched.core.model.records import MAX_COUNT, MAX_SERIAL, Serial
from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.integrations.http import MAX_BODY
from rollout_sched.live import RunOptions, Settings
from rollout_sched.process import Format, Level

Port = Annotated[int, msgspec.Meta(ge=0, le=65535), Flag(metavar="PORT")]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
KeyFile = Annotated[Path | None, Flag(metavar="FILE")]


class Options(RunOptions, frozen=True, kw_only=True):
    """Every file is read, and every error is raised, before the port is opened.

    policy                 a preset or a TOML file
    allow_code             import classes and functions of your own that the policy names
    host                   the address to listen on
    port                   0 picks a free one
    workers                further processes for clients' calls, which listen at the port (0: none,
                           one process does all)
    control_port           of everything else if there are workers; 0 picks a free one
    instances              a vLLM or SGLang server; repeat for each. A server that is not up yet
                           joins later
    endpoints              a file that lists the instances, in llm-d's format; it is watched for
                           changes
    allow_instances        URLs that may be added later, e.g. http://10.0.0.*:8000; repeatable
                           (default: any)
    list_itself            name the gateway among the servers in /workers and /list_workers, for
                           trainers that abort at every server that is listed (slime, miles)
    slots                  requests that an instance runs at once, where vLLM does not report it
    kv_tokens              the size of its KV cache, where vLLM does not report it
    weights_roots          weights given by path must lie in this folder; repeatable (default:
                           anywhere)
    api_key_file           clients' keys; without the file they need none
    trainer_key_file       trainers' keys, for more routes
    admin_key_file         administrators' keys, for all routes
    admin_socket           a Unix socket that needs no key
    instance_api_key_file  vLLM's own --api-key: KEY for the instances given here, URL KEY for one
                           of them
    max_requests           responses that may be open at once, waiting or running
    max_client_requests    those of one client (default: as many as leave some for others)
    max_client_tokens      tokens of their prompts and responses (default: any number)
    max_body               the largest body of a request
    max_bodies             bytes of all bodies that are held at once
    max_samples            samples of the trainer's API that may be open at once
    drain_s                after SIGTERM, /health is 503 but calls are still taken, so that load
                           balancers learn of it
    grace_s                for running requests when it stops
    log_level              the lowest level that is logged
    log_format             one line per record; with json, printed lines are logged too
    access_log             log each call when it ends
    otlp                   collector for traces, e.g. http://127.0.0.1:4318
    live                   settings of the driver; they override those of the policy file
    """

    policy: Annotated[str, Flag(metavar="NAME_OR_TOML")]
    allow_code: bool = False
    host: Annotated[str, Flag(metavar="HOST")] = "127.0.0.1"
    port: Port = 9000
    workers: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    control_port: Port = 0
    instances: Annotated[list[str], Flag("--instance", "URL")] = msgspec.field(default_factory=list)
    endpoints: KeyFile = None
    allow_instances: Annotated[list[str], Flag("--allow-instance", "PATTERN")] = msgspec.field(
        default_factory=list
    )
    list_itself: bool = False
    slots: Annotated[AtLeastOne | None, Flag("--instance-slots")] = None
    kv_tokens: Annotated[Serial | None, Flag("--instance-kv-tokens")] = None
    weights_roots: Annotated[list[Path], Flag("--weights-root", "DIR")] = msgspec.field(
        default_factory=list
    )
    api_key_file: KeyFile = None
    trainer_key_file: KeyFile = None
    admin_key_file: KeyFile = None
    admin_socket: Path | None = None
    instance_api_key_file: KeyFile = None
    max_requests: AtLeastOne = Limits().requests
    max_client_requests: AtLeastOne | None = None
    max_client_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SERIAL)] | None = None
    max_body: Annotated[AtLeastOne, Flag(metavar="MB", unit=2**20)] = MAX_BODY
    max_bodies: Serial = Limits().body_bytes
    max_samples: AtLeastOne = 3_200_000  # twice 100,000 groups of 16
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    log_level: Level = "info"
    log_format: Format = "text"
    access_log: bool = False
    otlp: Annotated[str, Flag(metavar="URL")] = ""
    live: dict[str, Any] = msgspec.field(default_factory=dict)


def limits_of(options: Options) -> Limits:
    """The limits on the calls of clients."""
    return Limits(
        requests=options.max_requests,
        body_bytes=options.max_bodies,
        client_requests=options.max_client_requests,
        client_tokens=options.max_client_tokens,
    )


# ------------------------------------------------------------------------------------------
# The command-line flags of a gateway, for every command that starts one.

#: Title and text of each group of flags, and its fields.
_GROUPS = {
    ("address", None): "host port",
    (
        "fleet",
        None,
    ): "instances endpoints allow_instances list_itself slots kv_tokens weights_roots",
    ("keys", "each file has one key per line"): (
        "api_key_file trainer_key_file admin_key_file admin_socket instance_api_key_file"
    ),
    ("limits", None): (
        "max_requests max_client_requests max_client_tokens max_body max_samples drain_s grace_s"
    ),
    ("logs", None): "log_level log_format access_log otlp",
    ("run", None): " ".join(RunOptions.__struct_fields__),
}


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add_flags(parser, Options, ["policy", "allow_code"])
    for (title, about), names in _GROUPS.items():
        add_flags(parser.add_argument_group(title, about), Options, names.split())
    patience = "each also a key of the policy file's [live] table"
    add_flags(parser.add_argument_group("patience", patience), Settings)


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of several processes on one machine."""
    about = "for more calls than one core can take; limits count for each worker"
    add_flags(parser.add_argument_group("workers", about), Options, ["workers", "control_port"])


def given_options(namespace: argparse.Namespace) -> Options:
    """The options that the flags give."""
    return Options(**given_flags(namespace, Options), live=given_flags(namespace, Settings))
