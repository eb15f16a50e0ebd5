"""The commands about scenarios: `rollout-sched scenarios` lists, shows, checks and guesses them,
`rollout-sched speculate` says which drafts would pay in one."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_sched.config import load_policy, shipped
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import Count, Size
from rollout_sched.flags import Flag, add_flags, given_flags, number, positive
from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.formula import Layout, Model, Precision, gpu_named, model_named
from rollout_sched.simulators.instance import Speculation, StepTime
from rollout_sched.simulators.replay import Scenario, load_scenario, parse_scenario, runs
from rollout_sched.simulators.traces.command import add_trace, read_trace
from rollout_sched.simulators.traces.model import Trace

_FOLDER = "simulators/replay/scenarios"
_SHAPE = ("hidden", "heads", "kv_heads", "head_dim", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_list)
    verbs = parser.add_subparsers(metavar="VERB")
    verbs.add_parser("list", help="names and descriptions; the default verb").set_defaults(
        run=_list
    )
    show = verbs.add_parser("show", help="print a scenario's file and the speeds it implies")
    show.add_argument("scenario", metavar="NAME_OR_TOML")
    show.set_defaults(run=_show)
    check = verbs.add_parser("check", help="check whether a file is valid")
    check.add_argument("scenario", metavar="NAME_OR_TOML")
    check.set_defaults(run=_check)
    _add_guess(verbs)


def _add_guess(verbs: Any) -> None:
    parser = verbs.add_parser(
        "guess", help="guess a scenario from a GPU's data sheet and a model's shape"
    )
    option = parser.add_argument
    option("--gpu", required=True, metavar="NAME", help="such as h100; an unknown one lists all")
    option("--model", metavar="NAME", help="such as qwen2.5-32b; an unknown one lists all")
    option("--params", type=number, metavar="N", help="such as 14e9; with --layers, not --model")
    option("--layers", type=positive, metavar="N")
    for name in _SHAPE:
        option(f"--{name.replace('_', '-')}", type=positive, metavar="N", help="default: usual")
    add_flags(parser, Layout)
    add_flags(parser, Precision)
    parser.set_defaults(run=_guess)


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
    gpu, model = gpu_named(options.gpu), _model(options)
    layout = Layout(**given_flags(options, Layout))
    precision = Precision(**given_flags(options, Precision))
    tables = formula.scenario(gpu, model, layout, precision)
    named = options.model or f"{options.params:g} parameters in {options.layers} layers"
    turns = (
        f"{layout.trainer_gpus} more train" if layout.trainer_gpus else "the trainer takes turns"
    )
    about = (
        f"{named} on {layout.gpus} {options.gpu}: {layout.instances} instances of TP{layout.tp}, "
        f"{turns}. Weights in {precision.weights}, KV in {precision.kv}."
    )
    parse_scenario("guess", {"about": about, **tables})
    print("# A first guess, not measured: measure with rollout-sched calibrate URL.")
    if gpu.like:
        print(f"# Nothing was fitted for this GPU: it gets the efficiencies of {gpu.like}.")
    if options.model is None:
        print(f"# Assumed model: {_shape_of(model)}.")
    print(f'about = "{about}"')
    print('source = "rollout-sched scenarios guess: from data sheets; trainer at 40 % MFU"')
    for name, table in tables.items():
        print(f"\n[{name}]")
        for key, value in table.items():
            print(f"{key} = {_toml(value)}")


def _model(options: argparse.Namespace) -> Model:
    if options.model is not None:
        if options.params is not None or options.layers is not None:
            raise CallerError("--model excludes --params and --layers; give one or the other")
        return model_named(options.model)
    if options.params is None or options.layers is None:
        raise CallerError("give --model NAME, or --params and --layers")
    if options.params < 1e6:
        raise CallerError(f"--params {options.params:g}: a number of parameters, such as 14e9")
    told = {name: getattr(options, name) for name in _SHAPE}
    return formula.shaped(options.params, options.layers, **told)


def _shape_of(model: Model) -> str:
    return ", ".join(f"{name} {getattr(model, name)}" for name in _SHAPE)


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
    change = msgspec.structs.replace
    worlds = [
        change(scenario, speculation=None),
        change(scenario, speculation=change(drafts, schedule=rows)),
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
