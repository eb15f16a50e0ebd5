"""The command `rollout-sched fake-instance`: run a simulated vLLM server until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable

import msgspec

from rollout_sched import process as event_loop
from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.fake_instance import faults
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.tokens import LARGEST, Vocabulary
from rollout_sched.simulators.instance import InstanceSpec
from rollout_sched.simulators.replay import load_scenario

DEFAULT_SCENARIO = "qwen7b-8xh100"

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineSettings)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--host", default="127.0.0.1", help="default: %(default)s")
    option("--port", type=int, default=8000, help="0: any free port; default: %(default)s")
    _setting(parser, "--model", str, "name of the served model; default: %(default)s")
    option("--api-key", default="", metavar="KEY", help="require this key, as vLLM does")
    option(
        "--scenario",
        default=DEFAULT_SCENARIO,
        metavar="NAME_OR_TOML",
        help="defines the instance and the load time of weights; default: %(default)s",
    )
    option("--max-num-seqs", type=int, default=0, metavar="N", help="override the scenario's value")
    _setting(parser, "--speed", float, "times faster than real time")
    _setting(parser, "--seed", int, "of response lengths and faults")
    _setting(parser, "--median-tokens", int, "median of random response lengths")
    _setting(parser, "--sigma", float, "standard deviation of their logarithm")
    _setting(parser, "--stream-interval", int, "tokens per streamed chunk")
    _setting(parser, "--max-num-queued-reqs", int, "0: no limit", "max_queued")
    _setting(parser, "--tensor-parallel-size", int, "ranks in weight transfers", "world_size")
    option("--vocab-size", type=int, default=0, metavar="N", help="token ids are less than N")
    _setting(parser, "--weight-version", str, "label of the initial weights")
    option("--versioned-text", action="store_true", help="other weights give another text")
    option("--fault", action="append", default=[], metavar="KIND[=PROBABILITY]", help="repeatable")
    parser.set_defaults(run=run)


def _setting(
    parser: argparse.ArgumentParser,
    name: str,
    kind: Callable[[str], object],
    meaning: str,
    setting: str = "",
) -> None:
    """An option that is a field of EngineSettings and has that field's default."""
    setting = setting or name.removeprefix("--").replace("-", "_")
    metavar = "X" if kind is float else "N" if kind is int else None
    parser.add_argument(
        name,
        dest=setting,
        type=kind,
        default=_DEFAULTS[setting],
        metavar=metavar,
        help=meaning,
    )


def run(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Raises CallerError for invalid options."""
    settings = _settings(options)
    try:
        switches = [faults.parse(text) for text in options.fault]
    except ValueError as error:
        raise CallerError(f"--fault: {error}") from None
    event_loop.run(_serve(options, settings, switches))


def _settings(options: argparse.Namespace) -> EngineSettings:
    for flag, told in (
        ("--speed", options.speed),
        ("--median-tokens", options.median_tokens),
        ("--stream-interval", options.stream_interval),
        ("--tensor-parallel-size", options.world_size),
    ):
        if not told > 0:
            raise CallerError(f"{flag} must be more than 0")
    scenario = load_scenario(options.scenario)
    spec = _startable(scenario.instance)
    if options.max_num_seqs:
        try:
            spec = msgspec.structs.replace(spec, max_num_seqs=options.max_num_seqs)
        except ValueError as error:
            raise CallerError(f"--max-num-seqs: {error}") from None
    return EngineSettings(
        spec,
        model=options.model,
        speed=options.speed,
        seed=options.seed,
        update_s=scenario.weights.seconds,
        median_tokens=options.median_tokens,
        sigma=options.sigma,
        stream_interval=options.stream_interval,
        max_queued=options.max_queued,
        weight_version=options.weight_version,
        versioned_text=options.versioned_text,
        world_size=options.world_size,
        vocabulary=_vocabulary(options.vocab_size),
    )


def _vocabulary(size: int) -> Vocabulary:
    try:
        return Vocabulary.of_size(size) if size else LARGEST
    except ValueError as error:
        raise CallerError(f"--vocab-size: {error}") from None


def _startable(spec: InstanceSpec) -> InstanceSpec:
    """Refuse to start, like vLLM, if a request of max_model_len does not fit the KV cache."""
    fits = min(spec.max_model_len, spec.kv_blocks * spec.block_size)
    return msgspec.structs.replace(spec, max_model_len=fits)


async def _serve(
    options: argparse.Namespace, settings: EngineSettings, switches: list[faults.Fault]
) -> None:
    from rollout_sched.simulators.fake_instance.server import FakeServer  # aiohttp loads slowly

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = FakeServer(settings, api_key=options.api_key, faults=switches)
    port = await server.start(options.host, options.port)
    print(f"{settings.model} ready on http://{options.host}:{port}", flush=True)
    await stop.wait()
    await server.close()
