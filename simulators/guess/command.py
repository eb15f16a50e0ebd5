"""The commands about scenarios: `rollout-sched scenario` lists, shows, checks and guesses them,
`rollout-sched speculate` says which drafts would pay in one."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from rollout_sched.config import load_policy, shipped
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import Count, Size
from rollout_sched.flags import Flag, above_zero, add_flags, given_flags, number, positive
from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.architecture import (
    Model,
    dense_model,
    model_in,
    model_named,
    usual_shape,
)
from rollout_sched.simulators.guess.formula import Gpu, Layout, Precision, gpu_named
from rollout_sched.simulators.instance import Speculation, StepTime
from rollout_sched.simulators.replay import Scenario, load_scenario, parse_scenario, runs
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import Trace

_FOLDER = "simulators/replay/scenarios"
_SHAPE = ("hidden", "heads", "kv_heads", "head_dim", "vocabulary")

#: Flags for the numbers of a data sheet: the field of Gpu, its unit, and what it is.
_SHEET = {
    "hbm_tb_s": ("hbm_bytes_per_s", 1e12, "memory bandwidth, TB/s"),
    "tflops": ("flops", 1e12, "dense bf16 peak, TFLOP/s"),
    "memory_gb": ("memory_bytes", 1e9, "memory, GB"),
    "link_gb_s": ("link_bytes_per_s", 1e9, "to other nodes, GB/s of one GPU in one direction"),
}

#: The fields of a layout that have a flag where a fleet is guessed in passing.
_FLEET = ("gpus", "tp", "trainer_gpus")

#: Larger models are mixtures of experts, as a rule.
_LARGEST_DENSE = 130e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)
    verbs = parser.add_subparsers(metavar="VERB")
    for name, about, run, example in (
        ("list", "names and descriptions; the default verb", _list, ""),
        ("show", "print a scenario's file and the speeds it implies", _show, "qwen7b-8xh100"),
        ("check", "check whether a file is valid", _check, "mine.toml"),
    ):
        line = f"example: rollout-sched scenario {name} {example}".rstrip()
        verb = verbs.add_parser(name, help=about, epilog=line)
        verb.set_defaults(run=run)
        if example:
            verb.add_argument("scenario", metavar="NAME_OR_TOML")
    _add_guess(verbs)


def _add_guess(verbs: Any) -> None:
    parser = verbs.add_parser(
        "guess",
        help="guess a scenario from a GPU's data sheet and a model's shape",
        epilog="example: rollout-sched scenario guess --gpu h100 --model qwen2.5-32b --tp 2",
    )
    _add_hardware(parser)
    option = parser.add_argument
    for name, (_, _, meaning) in _SHEET.items():
        option(f"--{name.replace('_', '-')}", type=above_zero, metavar="N", help=meaning)
    option("--config", type=Path, metavar="PATH", help="a model's config.json, or its folder")
    option("--params", type=number, metavar="N", help="such as 14e9, of a dense model")
    option("--layers", type=positive, metavar="N", help="with --params")
    option("--dense", action="store_true", help="it is dense, though it has over 130e9 parameters")
    for name in _SHAPE:
        option(f"--{name.replace('_', '-')}", type=positive, metavar="N", help="default: usual")
    add_flags(parser, Layout)
    add_flags(parser, Precision)
    parser.set_defaults(run=_guess)


def _add_hardware(to: Any) -> None:
    to.add_argument("--gpu", metavar="NAME", help="such as h100; an unknown one lists all")
    about = "such as Qwen/Qwen3-30B-A3B, or its config.json; an unknown one lists all"
    to.add_argument("--model", metavar="NAME_OR_CONFIG", help=about)


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a fleet to guess, for a command that has --scenario."""
    about = "guessed, in place of --scenario; `scenario guess` has more flags, and writes a file"
    group = parser.add_argument_group("fleet", about)
    _add_hardware(group)
    add_flags(group, Layout, _FLEET)
    parser.set_defaults(**dict.fromkeys(("config", "params", "layers", *_SHEET)))


def guessed_fleet(options: argparse.Namespace, *, instead: bool) -> Scenario | None:
    """The scenario of these flags, None if there are none. `instead`: it has one from elsewhere.
    Raises CallerError."""
    given = fleet_words(options)
    if not given:
        return None
    if instead:
        raise CallerError(f"{given[0]} guesses a fleet, but there is a scenario; leave one out")
    if options.gpu is None or options.model is None:
        raise CallerError(f"{given[0]} guesses a fleet, which needs --gpu and --model")
    return parse_scenario("guess", _guessed(options)[0])


def fleet_words(options: argparse.Namespace) -> list[str]:
    """Its flags, as they were given."""
    named = {"gpu": options.gpu, "model": options.model}
    named |= {name: given_flags(options, Layout).get(name) for name in _FLEET}
    given = [(name, value) for name, value in named.items() if value is not None]
    return [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]


def _list(options: argparse.Namespace) -> None:
    for name in shipped(_FOLDER):
        print(f"{name:32s} {load_scenario(name).about}")


def _show(options: argparse.Namespace) -> None:
    scenario = load_scenario(options.scenario)
    path = Path(options.scenario)
    if options.scenario in shipped(_FOLDER):
        text = (files("rollout_sched") / _FOLDER / f"{options.scenario}.toml").read_text()
    else:
        text = path.read_text()
    print(text.rstrip())
    print()
    for line in _speeds(scenario):
        print(f"# {line}")


def _check(options: argparse.Namespace) -> None:
    scenario = load_scenario(options.scenario)
    fleet = scenario.fleet
    print(
        f"{options.scenario}: valid ({fleet.instances} instances, {fleet.kv_tokens:,} tokens of KV "
        f"and {fleet.max_num_seqs} sequences each, trainer {scenario.trainer.placement})"
    )
    for line in _speeds(scenario):
        print(line)


def _speeds(scenario: Scenario) -> list[str]:
    """The speeds of one instance that the constants imply."""
    time, fleet = StepTime(scenario.cost, scenario.speculation), scenario.fleet
    many = max(1, min(64, fleet.max_num_seqs, fleet.kv_tokens // 4096))
    alone_s = time.step(1, 1, 1024, 0.0, 0)
    batch_s = time.step(many, many, many * 4096, 0.0, 0)
    tokens = fleet.max_num_batched_tokens
    prefill_s = time.step(0, tokens, 0, tokens * tokens / 2, 1)
    return [
        f"one instance: {1 / alone_s:,.4g} tokens/s alone at 1,024 tokens of context, "
        f"{many / batch_s:,.4g} with {many} at 4,096,",
        f"  {tokens / prefill_s:,.4g} tokens/s of prefill",
    ]


def _guess(options: argparse.Namespace) -> None:
    tables, notes = _guessed(options)
    parse_scenario("guess", tables)
    for note in notes:
        print(f"# {note}")
    for name, table in tables.items():
        if isinstance(table, str):
            print(f"{name} = {json.dumps(table)}")
            continue
        print(f"\n[{name}]")
        for key, value in table.items():
            print(f"{key} = {_toml(value)}")


def _guessed(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The tables of a scenario file, and what its reader should know."""
    (gpu, gpu_name), (model, model_name, assumed) = _gpu(options), _model(options)
    layout = Layout(**given_flags(options, Layout))
    precision = Precision(**given_flags(options, Precision))
    turns = (
        f"{layout.trainer_gpus} more train" if layout.trainer_gpus else "the trainer takes turns"
    )
    about = (
        f"{model_name} on {layout.gpus} {gpu_name}: {layout.instances} instances of TP{layout.tp}, "
        f"{turns}. Weights in {precision.weights or model.published}, KV in {precision.kv}."
    )
    notes = [
        "A first guess, not measured. Most published servers are slower (docs/prediction.md):",
        "measure yours with rollout-sched calibrate URL.",
    ]
    if gpu.like:
        notes.append(f"Nothing was fitted for this GPU: it gets the efficiencies of {gpu.like}.")
    if assumed:
        notes.append(f"Assumed: a dense model, {assumed}.")
    if model.experts:
        notes.append(
            f"{model.params / 1e9:.4g}e9 parameters, {model.active_params / 1e9:.3g}e9 active "
            f"in a token: {model.chosen} of {model.experts} experts."
        )
    source = "rollout-sched scenario guess: from data sheets; trainer at 40 % MFU"
    tables = {
        name: {key: _rounded(value) for key, value in table.items()}
        for name, table in formula.scenario(gpu, model, layout, precision).items()
    }
    return {"about": about, "source": source, **tables}, notes


def _gpu(options: argparse.Namespace) -> tuple[Gpu, str]:
    numbers = {
        field: getattr(options, name) * unit
        for name, (field, unit, _) in _SHEET.items()
        if getattr(options, name) is not None
    }
    if options.gpu is not None:
        return replace(gpu_named(options.gpu), **numbers), options.gpu
    if len(numbers) < len(_SHEET) - ("link_bytes_per_s" not in numbers):
        raise CallerError("give --gpu NAME, or --hbm-tb-s, --tflops and --memory-gb")
    return replace(gpu_named("h100"), **numbers, like="h100"), "accelerators"


def _model(options: argparse.Namespace) -> tuple[Model, str, str]:
    """The model, its name, and what was assumed of it."""
    by_size = options.params is not None or options.layers is not None
    if (options.model is not None) + (options.config is not None) + by_size > 1:
        raise CallerError(
            "--model, --config and --params with --layers exclude each other; give one or the other"
        )
    path = options.config
    if options.model is not None:
        path = Path(options.model)
        if not (path.is_file() or (path / "config.json").is_file()):
            return model_named(options.model), options.model, ""
    if path is not None:
        file = path.resolve()
        return model_in(path), file.parent.name if file.is_file() else file.name, ""
    if options.params is None or options.layers is None:
        raise CallerError("give --model NAME, --config PATH, or --params and --layers")
    if options.params < 1e6:
        raise CallerError(f"--params {options.params:g}: a number of parameters, such as 14e9")
    if options.params > _LARGEST_DENSE and not options.dense:
        raise CallerError(
            f"--params {options.params:g}: models of this size are mixtures of experts, which cost "
            f"a fraction of a dense one; give --config or --model, or --dense if it is dense"
        )
    given = {name: getattr(options, name) for name in _SHAPE}
    shape = usual_shape(options.params, options.layers, given)
    assumed = ", ".join(f"{name} {shape[name]}" for name in _SHAPE)
    named = f"{options.params:g} parameters in {options.layers} layers"
    return dense_model(options.params, options.layers, shape), named, assumed


def _rounded(value: Any) -> Any:
    """To the four digits that the file has, so that it says the same as the flags."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- rollout-sched speculate -------------------------------------------------------------------


class SpeculateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a scenario's drafts.

    scenario    its [speculation] is taken, if it has one
    policies    whose gain is shown; repeatable
    drafter     the model that drafts, as the engine is to be given it
    tokens      the most drafts per sequence and step, in place of the scenario's (4 if it has none)
    acceptance  likewise (0.6)
    method      likewise (draft_model)
    steps       replay only the prompts of the first N steps; 0: all
    """

    scenario: Annotated[str, Flag(metavar="NAME_OR_TOML")] = "qwen7b-8xh100"
    policies: Annotated[list[str], Flag("--policy", "NAME_OR_TOML")] = []
    drafter: str = "DRAFTER"
    tokens: Size | None = None
    acceptance: float | None = None
    method: str | None = None
    steps: Count = 0


def add_speculate_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_flags(parser, SpeculateOptions)
    parser.set_defaults(run=_speculate)


def _speculate(given: argparse.Namespace) -> None:
    options = SpeculateOptions(**given_flags(given, SpeculateOptions))
    trace, scenario = read_trace(given), load_scenario(options.scenario)
    drafts = _drafts(options, trace, scenario.speculation)
    time = StepTime(scenario.cost, drafts)
    rows = time.schedule(scenario.fleet.max_num_seqs)
    if not any(row[2] for row in rows):
        print(f"At acceptance {drafts.acceptance:g} no drafts pay, at any number of sequences.")
    else:
        print(f"--speculative-config '{json.dumps(_config(drafts, rows, options.drafter))}'")
    print(f"\n{'sequences':>12} {'drafts':>7} {'break-even acceptance of 1':>27} {'of all':>7}")
    for first, last, count in rows:
        each = [time.break_even(last, number) for number in (1, drafts.tokens)]
        shown = ["never" if value > 1 else f"{value:.2f}" for value in each]
        print(f"{first:>6}-{last:<5} {count:>7} {shown[0]:>27} {shown[1]:>7}")
    worlds = [
        replace(scenario, speculation=None),
        replace(scenario, speculation=replace(drafts, schedule=rows)),
    ]
    print(f"\n{'policy':20} {'without':>10} {'with':>10} {'gain':>7}")
    names = options.policies or ["round_robin_sync", "best_on_policy", "best_async"]
    policies = [load_policy(name) for name in names]
    each_world = [runs.replay(trace, policies, world, steps=options.steps) for world in worlds]
    for policy, [without], [drafted] in zip(policies, *each_world, strict=True):
        before, after = without.summary.total_s, drafted.summary.total_s
        print(f"{policy.name:20} {before:>8,.0f} s {after:>8,.0f} s {before / after:>6.2f}x")


def _drafts(options: SpeculateOptions, trace: Trace, own: Speculation | None) -> Speculation:
    """The drafts to judge, at the context in which the trace's tokens are generated on average."""
    samples = [sample for group in trace.groups.values() for sample in group]
    made = [sample.response_tokens for sample in samples]
    reach = sum([n * (s.prompt_tokens + n / 2) for s, n in zip(samples, made, strict=True)])
    names = ("tokens", "acceptance", "method")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    base = Speculation(tokens=4, acceptance=0.6) if own is None else own
    found = {"schedule": "auto", "context": round(reach / max(1, sum(made))), **asked}
    try:
        return msgspec.convert({**msgspec.structs.asdict(base), **found}, Speculation)
    except msgspec.ValidationError as error:
        raise CallerError(str(error)) from error


def _config(drafts: Speculation, rows: tuple[tuple[int, int, int], ...], model: str) -> Any:
    """vLLM's `SpeculativeConfig`."""
    config: dict[str, Any] = {"method": drafts.method}
    if drafts.method in ("draft_model", "eagle"):
        config["model"] = model
    config["num_speculative_tokens"] = max(row[2] for row in rows)
    if len(rows) > 1:
        config["num_speculative_tokens_per_batch_size"] = rows
    return config
