"""The options of `rollout-sched serve`, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.integrations.gateway.data_plane.limits import Limits
from rollout_sched.integrations.http.limits import MAX_BODY
from rollout_sched.live.run_options import RunOptions
from rollout_sched.log_lines import Format, Level


class Options(RunOptions, frozen=True, kw_only=True):
    """Every file is read, and every error is raised, before the port is opened.

    policy, instances  a preset or a TOML file; URLs of vLLM servers
    endpoints          a file that lists instances; it is watched for changes (`endpoints_file`)
    max_requests       responses that may be here at once, waiting or running
    max_body           bytes of one request's body
    max_bodies         bytes of all bodies that are held at once
    max_samples        samples of the trainer's API that may be here at once
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
