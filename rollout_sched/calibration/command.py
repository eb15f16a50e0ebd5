"""The command `rollout-sched calibrate`: writes a scenario from measurements of a running vLLM."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import textwrap
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_sched import terminal
from rollout_sched.calibration.bursts import DraftCounts, DraftFit, Room
from rollout_sched.calibration.calibration import Calibration, Calibrator, Report, StepCalibrator
from rollout_sched.core.errors import CallerError
from rollout_sched.flags import above_zero, positive
from rollout_sched.integrations.http.server import read_keys
from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.integrations.vllm import HttpInstance, SteppedEngine
from rollout_sched.live.ports import InstanceError
from rollout_sched.process import check_writable, whole_file
from rollout_sched.simulators.replay import Scenario, load_scenario, parse_scenario

_T = TypeVar("_T")

# ------------------------------------------------------------------------------------------
# Writes a calibration as a scenario file; its header tells how accurate the figures are.

#: Significant digits of measured values.
_DIGITS = 4
_WIDTH = 100


def scenario_text(found: Calibration, where: str, when: str) -> str:
    """The whole TOML file. `where` and `when`: place and time of the measurement, as text. Raises
    ConfigError if the result is not a valid scenario."""
    header = [line for paragraph in _header(found, where, when) for line in _comment(paragraph)]
    text = "\n".join([*header, "", *_tables(found, where), ""])
    parse_scenario("calibrated", tomllib.loads(text))
    return text


def _header(found: Calibration, where: str, when: str) -> Iterator[str]:
    fit = found.fit
    version = f"vLLM {found.limits.version}" if found.limits.version else "vLLM of unknown version"
    yield f"Calibrated on {where} ({version}, model {found.model}), {when}."
    what = "kinds of steps" if found.in_process else "bursts of requests"
    spread = "unknown, because nothing was measured three times"
    if found.spread is not None:
        spread = f"{found.spread:.1%} (median over all of half the interquartile range)"
    yield (
        f"Fit error {fit.mean_error:.1%} mean, {fit.max_error:.1%} max, over {found.bursts} "
        f"{what} measured {found.measured} times in total; spread {spread}. Measured up to "
        f"{found.context:,} tokens of context in a batch; values beyond are extrapolated."
    )
    if found.writing_s is not None:
        yield (
            f"Outside the engine, and not in the scenario: {fit.call_s * 1e3:.2f} ms per call, "
            f"{found.writing_s * 1e6:.1f} us per answer token (uncomment [links] at the end to "
            "include them, as an HTTP client of this kind sees them)."
        )
    if found.disturbed:
        yield (
            f"{found.disturbed} measurements were thrown away: other requests were served "
            "meanwhile."
        )
    if not found.whole:
        yield "The calibration was stopped early: some bursts were never measured."
    for line in _unknown(found):
        yield f"Not determined: {line}"


def _unknown(found: Calibration) -> Iterator[str]:
    cost = found.fit.cost
    if found.limits.max_num_batched_tokens is None:
        yield "max_num_batched_tokens: vLLM's default is used (VLLM_SERVER_DEV_MODE=1 reports it)."
    if found.limits.block_size is None:
        yield "block_size."
    if found.prefix_caching is None:
        yield "prefix_caching: a repeated prompt was neither counted as cached nor faster."
    if not (cost.step_s and cost.weights_s):
        yield "step_s and weights_s separately: only their sum was measured."
    for name in ("sequence_s", "context_s", "attention_s", "request_s", "prefill_s"):
        if not getattr(cost, name):
            yield f"{name}: too small to measure, or included in another constant."
    yield "the trainer, which is a guess: put in your own values."
    if found.reload_s is None:
        yield "the time to load weights (--weights CHECKPOINT measures it): put in your own value."
    if found.pause_s is None:
        yield "the time of a pause: the server offers none, so updates run under running requests."


def _tables(found: Calibration, where: str) -> Iterator[str]:
    room, cost, fit = found.room, found.fit.cost, found.fit
    count = f"{found.instances} instances" if found.instances > 1 else "one instance"
    yield f"about = {_quoted(f'{found.model} on {where}, {count}.')}"
    error = f"fit error {fit.mean_error:.1%} mean, {fit.max_error:.1%} max"
    yield f"source = {_quoted(f'rollout-sched calibrate: {error}')}"
    yield ""
    yield "[fleet]"
    yield f"instances = {found.instances}"
    yield f"kv_tokens = {room.kv_tokens}"
    if found.limits.block_size is not None:
        yield f"block_size = {found.limits.block_size}"
    yield f"max_num_seqs = {room.slots}"
    yield f"max_num_batched_tokens = {max(found.max_num_batched_tokens, room.slots)}"
    yield f"max_model_len = {room.max_model_len}"
    if found.prefix_caching is not None:
        yield f"prefix_caching = {str(found.prefix_caching).lower()}"
    yield ""
    yield "[cost]"
    for name in cost.__struct_fields__:
        yield f"{name} = {getattr(cost, name):.{_DIGITS}g}"
    yield ""
    yield "[trainer]                       # a guess"
    yield 'placement = "disaggregated"'
    yield "fixed_s = 1.0"
    yield ""
    yield "[weights]"
    pause_s = found.pause_s or 0.0
    if found.reload_s is None:
        yield f"fixed_s = {pause_s:.{_DIGITS}g}  # only a pause and a resume: put in your own value"
    else:
        yield f"fixed_s = {found.reload_s:.{_DIGITS}g}"
    if found.writing_s is not None:
        yield ""
        yield "# [links]"
        yield f"# fronts = {found.instances}"
        yield f"# delay_s = {fit.call_s / 2:.{_DIGITS}g}"
        yield f"# token_s = {found.writing_s:.{_DIGITS}g}"


def _comment(paragraph: str) -> list[str]:
    return textwrap.wrap(
        paragraph, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def _quoted(text: str) -> str:
    """The text as a TOML basic string."""
    safe = "".join(character if character.isprintable() else " " for character in text)
    escaped = safe.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# ------------------------------------------------------------------------------------------
# Drafts, as a table that the scenario of the same server without them gets.

#: After so many drafts for the requests of others, their acceptance counts, not that of the bursts.
_SERVED_DRAFTS = 1000


def speculation_text(
    base: Scenario, found: tuple[Room, DraftCounts, DraftFit], where: str, when: str
) -> str:
    """What is to be appended to the file of `base`."""
    room, served, fit = found
    drafts, errors = fit.speculation, [abs(error) for error in fit.errors]
    kv_share = max(0.0, 1 - room.kv_tokens / base.fleet.kv_tokens)
    acceptance, whose = drafts.acceptance, "random prompts: put in that of your own"
    if served.drafts >= _SERVED_DRAFTS:
        acceptance, whose = served.acceptance, "the requests that were served before"
    header = (
        f"Drafts calibrated on {where}, {when}: fit error {sum(errors) / len(errors):.1%} mean, "
        f"{max(errors):.1%} max, over {len(errors)} bursts with {fit.counts.drafts:,} drafts, of "
        f"whose tokens {drafts.acceptance:.1%} were accepted if those before them were."
    )
    schedule = drafts.schedule
    lines = [
        *_comment(header),
        "[speculation]",
        f"tokens = {drafts.tokens}",
        f"acceptance = {acceptance:.{_DIGITS}g}  # of {whose}",
        f"schedule = {json.dumps(schedule)}",
        f"draft_share = {drafts.draft_cost:.{_DIGITS}g}",
        f"kv_share = {kv_share:.{_DIGITS}g}",
    ]
    return "\n".join(["", *lines, ""])


#: Enough to measure every burst three times.
DEFAULT_MINUTES = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("urls", nargs="*", metavar="URL", help="vLLM server; several must be identical")
    option("--engine", metavar="MODEL", help="instead of URLs: measure an engine in this process")
    option("--engine-args", default="{}", metavar="JSON", help="fields of vLLM's EngineArgs")
    option(
        "--minutes",
        type=above_zero,
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
    option(
        "--base",
        type=Path,
        metavar="FILE",
        help="the calibrated scenario of this server without drafts: measure what drafts cost",
    )
    option("--out", type=Path, metavar="FILE", help="the scenario file; default: standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError, InstanceError or OSError with the remedy. Ctrl-C writes the results so
    far."""
    if bool(options.urls) == bool(options.engine):
        raise CallerError("give either the URL of a running vLLM server or --engine MODEL")
    if options.base is not None and (options.engine or options.weights):
        raise CallerError("--base measures the drafts of servers: leave out --engine, --weights")
    if options.out is not None:
        check_writable(options.out)
    when = time.strftime("%Y-%m-%d %H:%M %Z")
    with _progress() as report:
        if options.base is not None:
            _write(options.out, asyncio.run(_with_drafts(options, when, report)))
            return
        if options.engine:
            where, found = "an engine in process", _of_engine(options, report)
        else:
            where = " ".join(options.urls)
            found = asyncio.run(
                _of_servers(
                    options, report, lambda each: each.run(60 * options.minutes, options.weights)
                )
            )
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
    if arguments.get("speculative_config"):
        raise CallerError("--engine-args: drafts are measured on servers only, by --base")
    engine = SteppedEngine.start(options.engine, arguments)
    calibrator = StepCalibrator(engine, secrets.randbits(64), report)
    return calibrator.run(60 * options.minutes, options.engine)


async def _with_drafts(options: argparse.Namespace, when: str, report: Report) -> str:
    """The scenario of --base with the servers' drafts."""
    base = load_scenario(str(options.base))
    if base.speculation is not None:
        raise CallerError(f"--base {options.base}: it has drafts already; remove [speculation]")

    async def measured(calibrator: Calibrator) -> tuple[Room, DraftCounts, DraftFit]:
        return await calibrator.drafts(base.cost, 60 * options.minutes)

    found = await _of_servers(options, report, measured)
    text = options.base.read_text() + speculation_text(base, found, " ".join(options.urls), when)
    parse_scenario("calibrated", tomllib.loads(text))
    return str(text)


async def _of_servers(
    options: argparse.Namespace, report: Report, measure: Callable[[Calibrator], Awaitable[_T]]
) -> _T:
    key = None if options.api_key_file is None else read_keys(options.api_key_file)[0]
    instances = [
        EngineInstance(url, api_key=key, slots=options.slots, kv_tokens=options.kv_tokens)
        for url in options.urls
    ]
    try:
        return await measure(await _calibrator(instances, options, report))
    except InstanceError as error:
        raise CallerError(f"{_named(instances)}: {error}{_remedy(str(error))}") from error
    finally:
        for instance in instances:
            await instance.close()


async def _calibrator(
    instances: Sequence[HttpInstance], options: argparse.Namespace, report: Report
) -> Calibrator:
    for instance in instances:
        await instance.describe()
    limits = await instances[0].limits()
    told = limits.max_num_batched_tokens or options.max_num_batched_tokens
    limits = msgspec.structs.replace(limits, max_num_batched_tokens=told)
    return Calibrator(instances, limits, seed=secrets.randbits(64), report=report)


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
    with Progress(*columns, console=terminal.console(stderr=True), transient=True) as bar:
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
