"""The command `rollout-sched fake-instance`: run a simulated server until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched import process as event_loop
from rollout_sched.core.errors import CallerError
from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.simulators.fake_instance.engine import EngineSettings, Fault, parse_fault
from rollout_sched.simulators.fake_instance.tokens import LARGEST, Vocabulary
from rollout_sched.simulators.instance import InstanceSpec
from rollout_sched.simulators.replay import load_scenario

DEFAULT_SCENARIO = "qwen7b-8xh100"

#: The fields of EngineSettings that have a flag.
_SETTINGS = (
    *("model", "speed", "seed", "median_tokens", "sigma", "stream_interval", "max_queued"),
    *("world_size", "weight_version", "versioned_text", "prompt_details", "as_vllm"),
)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated server besides its engine.

    host          the address to listen on
    port          0: any free port
    api_key       require this key, as vLLM does
    scenario      defines the instance and the load time of weights
    max_num_seqs  override the scenario's value
    vocab_size    token ids are less than N (default: as many as any model has)
    characters    a token is one to three bytes of UTF-8, not a word
    thinks        responses begin with reasoning, which chats have parsed
    dialect       the engine whose endpoints it has
    faults        repeatable
    """

    host: Annotated[str, Flag(metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_key: Annotated[str, Flag(metavar="KEY")] = ""
    scenario: Annotated[str, Flag(metavar="NAME_OR_TOML")] = DEFAULT_SCENARIO
    max_num_seqs: int | None = None
    vocab_size: int | None = None
    characters: bool = False
    thinks: bool = False
    dialect: Literal["vllm", "sglang"] = "vllm"
    faults: Annotated[list[str], Flag("--fault", "KIND[=PROBABILITY]")] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServerOptions)
    add_flags(parser, EngineSettings, _SETTINGS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Raises CallerError for invalid options."""
    options = ServerOptions(**given_flags(given, ServerOptions))
    settings = _settings(options, given_flags(given, EngineSettings))
    try:
        switches = [parse_fault(text) for text in options.faults]
    except ValueError as error:
        raise CallerError(f"--fault: {error}") from None
    event_loop.run(_serve(options, settings, switches))


def _settings(options: ServerOptions, given: Mapping[str, Any]) -> EngineSettings:
    scenario = load_scenario(options.scenario)
    spec, vocabulary = _startable(scenario.instance), LARGEST
    try:
        if options.max_num_seqs is not None:
            spec = msgspec.structs.replace(spec, max_num_seqs=options.max_num_seqs)
        if options.vocab_size is not None:
            vocabulary = Vocabulary.of_size(options.vocab_size)
        vocabulary = vocabulary._replace(characters=options.characters, thinks=options.thinks)
    except ValueError as error:
        raise CallerError(str(error)) from None
    update_s = scenario.weights.seconds
    return EngineSettings(spec, update_s=update_s, vocabulary=vocabulary, **given)


def _startable(spec: InstanceSpec) -> InstanceSpec:
    """Refuse to start, like vLLM, if a request of max_model_len does not fit the KV cache."""
    fits = min(spec.max_model_len, spec.kv_tokens)
    return msgspec.structs.replace(spec, max_model_len=fits)


async def _serve(options: ServerOptions, settings: EngineSettings, switches: list[Fault]) -> None:
    from rollout_sched.simulators.fake_instance.server import FakeServer  # aiohttp loads slowly

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = FakeServer(settings, api_key=options.api_key, faults=switches, dialect=options.dialect)
    port = await server.start(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"{settings.model} ready on http://{host}:{port}", flush=True)
    await stop.wait()
    await server.close()
