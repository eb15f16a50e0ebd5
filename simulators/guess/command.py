"""The command `rollout-sched scenarios`: list, show and check scenarios, or guess one."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollout_sched.config import shipped
from rollout_sched.core.errors import CallerError
from rollout_sched.flags import add_flags, given_flags, number, positive
from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.formula import Layout, Model, gpu_named, model_named
from rollout_sched.simulators.instance import StepTime
from rollout_sched.simulators.replay import Scenario, load_scenario, parse_scenario

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
    tables = formula.scenario(gpu, model, layout)
    named = options.model or f"{options.params:g} parameters in {options.layers} layers"
    turns = (
        f"{layout.trainer_gpus} more train" if layout.trainer_gpus else "the trainer takes turns"
    )
    about = (
        f"{named} on {layout.gpus} {options.gpu}: {layout.instances} instances of TP{layout.tp}, "
        f"{turns}."
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
