"""The command `rollout-sched serve`."""

from __future__ import annotations

import argparse

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway import serve
from rollout_sched.integrations.gateway.options import add_gateway_flags, given_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gateway_flags(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    given = given_options(options)
    if not (given.instances or given.endpoints):
        raise CallerError("no instance is named: use --instance URL or --endpoints FILE")
    serve.serve(given)
