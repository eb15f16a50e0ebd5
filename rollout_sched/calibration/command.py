"""The command `rollout-sched calibrate`: writes a scenario from measurements of a running vLLM."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_sched.argument_types import positive
from rollout_sched.argument_types import seconds as positive_number
from rollout_sched.calibration.calibration import Calibration, Calibrator, Report
from rollout_sched.calibration.in_process import StepCalibrator
from rollout_sched.calibration.scenario_text import scenario_text
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import read_keys
from rollout_sched.integrations.vllm.engine_limits import read_limits
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.integrations.vllm.stepped_engine import SteppedEngine
from rollout_sched.live.ports import InstanceError
from rollout_sched.whole_file import whole_file

#: Enough to measure every burst three times.
DEFAULT_MINUTES = 2.0


def add(commands: Any) -> None:
    """Add the command and its options to an argparse parser of commands."""
    parser = commands.add_parser(
        "calibrate", help="measure the engine steps of a running vLLM and write a scenario"
    )
    option = parser.add_argument
    option("urls", nargs="*", metavar="URL", help="vLLM server; several must be identical")
    option("--engine", metavar="MODEL", help="instead of URLs: measure an engine in this process")
    option("--engine-args", default="{}", metavar="JSON", help="fields of vLLM's EngineArgs")
    option(
        "--minutes",
        type=positive_number,
        default=DEFAULT_MINUTES,
        metavar="N",
        help="duration of the measurement; default: %(default)g",
    )
    unknown = "needed if vLLM does not report it"
    option("--slots", type=positive, metavar="N", help=f"vLLM's --max-num-seqs, {unknown}")
    option("--kv-tokens", type=positive, metavar="N", help=unknown)
    option("--max-num-batched-tokens", type=positive, metavar="N", help=unknown)
    option("--api-key-file", type=Path, metavar="FILE", help="first line: vLLM's --api-key")
    option(
        "--weights",
        default="",
        metavar="CHECKPOINT",
        help="measure the loading of this checkpoint: the served one, by its path on the server",
    )
    option("--out", type=Path, metavar="FILE", help="the scenario file; default: standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError, InstanceError or OSError with the remedy. Ctrl-C writes the results so
    far."""
    if bool(options.urls) == bool(options.engine):
        raise CallerError("give either the URL of a running vLLM server or --engine MODEL")
    if options.out is not None and not options.out.parent.is_dir():
        raise CallerError(f"--out {options.out}: folder {options.out.parent} does not exist")
    when = time.strftime("%Y-%m-%d %H:%M %Z")
    with _progress() as report:
        if options.engine:
            where, found = "an engine in process", _of_engine(options, report)
        else:
            where, found = " ".join(options.urls), asyncio.run(_of_servers(options, report))
    _write(options.out, scenario_text(found, where, when))
    fit = found.fit
    print(
        f"fit error {fit.mean_error:.1%} mean, {fit.max_error:.1%} max; the file's header lists "
        "what could not be determined",
        file=sys.stderr,
    )


def _of_engine(options: argparse.Namespace, report: Report) -> Calibration:
    try:
        arguments = json.loads(options.engine_args)
    except ValueError as error:
        raise CallerError(f"--engine-args: invalid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise CallerError('--engine-args: give a JSON object, such as {"max_model_len": 8192}')
    engine = SteppedEngine.start(options.engine, arguments)
    calibrator = StepCalibrator(engine, secrets.randbits(64), report)
    return calibrator.run(60 * options.minutes, options.engine)


async def _of_servers(options: argparse.Namespace, report: Report) -> Calibration:
    key = None if options.api_key_file is None else read_keys(options.api_key_file)[0]
    instances = [
        HttpInstance(url, api_key=key, slots=options.slots, kv_tokens=options.kv_tokens)
        for url in options.urls
    ]
    try:
        return await _measured(instances, options, report)
    except InstanceError as error:
        raise CallerError(f"{_named(instances)}: {error}{_remedy(str(error))}") from error
    finally:
        for instance in instances:
            await instance.close()


async def _measured(
    instances: Sequence[HttpInstance], options: argparse.Namespace, report: Report
) -> Calibration:
    for instance in instances:
        await instance.describe()
    limits = await read_limits(instances[0].control)
    told = limits.max_num_batched_tokens or options.max_num_batched_tokens
    limits = msgspec.structs.replace(limits, max_num_batched_tokens=told)
    calibrator = Calibrator(instances, limits, seed=secrets.randbits(64), report=report)
    return await calibrator.run(60 * options.minutes, options.weights)


def _named(instances: Sequence[HttpInstance]) -> str:
    return ", ".join(instance.name for instance in instances)


#: Text in an instance's error -> the option of this command that is the remedy.
_FLAGS = {
    "the API key": "--api-key-file FILE",
    "give slots": "--slots N",
    "give kv_tokens": "--kv-tokens N",
}


def _remedy(said: str) -> str:
    flags = [flag for words, flag in _FLAGS.items() if words in said]
    return f" (here: {', '.join(flags)})" if flags else ""


@contextmanager
def _progress() -> Iterator[Report]:
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=max(done, total), description=what
        )


def _write(path: Path | None, text: str) -> None:
    if path is None:
        print(text, end="")
        return
    with whole_file(path) as file:
        file.write(text.encode())
    print(f"{path}: scenario written; use it with replay --scenario {path}", file=sys.stderr)
