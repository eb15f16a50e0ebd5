"""The command line: the entry point, and the table of commands.

Only the module of the chosen command is imported: all of them together take a second.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

import rollout_sched


class Command(NamedTuple):
    """name      as it is typed
    about     its line in `rollout-sched --help`
    module    in the package
    function  adds arguments to the command's parser, and sets `run`
    """

    name: str
    about: str
    module: str
    function: str = "add_arguments"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        getattr(import_module(f"rollout_sched.{self.module}"), self.function)(parser)


COMMANDS: Final = (
    Command(
        "replay",
        "compare policies on a recorded workload or run",
        "inspection.replays",
        "add_replay_arguments",
    ),
    Command(
        "tune",
        "search for the policy that suits a workload or run best",
        "inspection.replays",
        "add_tune_arguments",
    ),
    Command("journal", "inspect the journal of a run", "inspection.command"),
    Command(
        "serve", "an OpenAI-compatible gateway to a fleet of vLLM", "integrations.gateway.serve"
    ),
    Command("ray", "run a scheduler and its fronts on a Ray cluster", "integrations.ray.command"),
    Command("salvage", "give up what a damaged store has lost", "cli", "add_salvage_arguments"),
    Command("top", "show the live state of a gateway: fleet, queue, steps, waste", "top"),
    Command(
        "fake-instance", "run a simulated vLLM or SGLang server", "simulators.fake_instance.command"
    ),
    Command("demo", "a live rollout, with a trainer loop and a summary", "demo"),
    Command("policy", "list, show or check policies", "policy_command"),
    Command("scenario", "list, show, check or guess scenarios", "simulators.guess.command"),
    Command(
        "speculate",
        "say which drafted tokens pay, as an option of the engine",
        "simulators.guess.command",
        "add_speculate_arguments",
    ),
    Command(
        "calibrate",
        "measure the engine steps of a running vLLM and write a scenario",
        "calibration.command",
    ),
    Command("trace", "inspect recorded workloads", "simulators.traces.command"),
)


#: Arguments of each command, shown under its help.
EXAMPLES: Final = {
    "replay": "lrm_token_economy --policy round_robin_sync --policy best_async",
    "tune": "lrm_token_economy --scenario qwen7b-8xh100 --max-staleness 1 --out mine.toml",
    "journal": "trace run.journal --out run.jsonl",
    "serve": "--policy best_async --instance http://gpu-1:8000 --instance http://gpu-2:8000",
    "ray": "up --policy best_async --servers vllm-*",
    "salvage": "/data/run-7",
    "top": "http://127.0.0.1:9000",
    "fake-instance": "--port 8000 --speed 10",
    "demo": "--policy tail_batching",
    "policy": "check mine.toml",
    "scenario": "guess --gpu h100 --model qwen2.5-7b",
    "speculate": "lrm_token_economy --scenario qwen7b-8xh100",
    "calibrate": "http://gpu-1:8000 --out mine.toml",
    "trace": "stats lrm_token_economy",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: 0 on success, 2 for unusable input, 130 if interrupted, 141 if the reader of its output
    has gone: the exit codes of a shell.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    from rollout_sched.terminal import plain_output

    with plain_output():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from rollout_sched.core.errors import RolloutError, reason_of

    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _write_to_nowhere()
        return 141
    except (RolloutError, OSError) as error:
        place = getattr(error, "filename", None)
        where = f"{place}: " if place else ""
        print(f"rollout-sched: {where}{reason_of(error)}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command that the arguments name; in `run` what runs it, and in `command`
    what was typed."""
    parser = _Parser(
        prog="rollout-sched", description="Rollout scheduling for RL post-training on vLLM fleets."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for command in COMMANDS:
        example = f"example: rollout-sched {command.name} {EXAMPLES[command.name]}"
        its_parser = parsers.add_parser(command.name, help=command.about, epilog=example)
        if command.name == chosen:
            command.add_arguments(its_parser)
    typed = shlex.join([parser.prog, *map(str, arguments)])
    return parser.parse_args(arguments, argparse.Namespace(command=typed))


def add_salvage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="DIR", help="the folder of a store")
    parser.set_defaults(run=_salvage)


def _salvage(options: argparse.Namespace) -> None:
    from pathlib import Path

    from rollout_sched.store import Store, StoreError

    if not os.path.isdir(options.store):
        raise StoreError(f"{options.store} is not the folder of a store")
    store = Store(Path(options.store), salvage=True)
    store.close()
    for line in store.losses.summary():
        print(line)
    print(f"{options.store}: " + ("its run can go on" if store.losses else "nothing is lost"))


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest flag or command for one that does not exist, and names an unknown flag
    before a missing one: it may be that, misspelt."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        if self._subparsers is None:  # else most flags are those of a command
            unknown = [w for w in self._words if w.startswith("--") and not self._known(w)]
            if unknown and "--" not in self._words:
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        from difflib import get_close_matches

        near: list[str] = []
        for word in self._words:
            if not self._known(word):
                near += get_close_matches(word.partition("=")[0], self._names(word), 1, 0.7)
        super().error(f"{message}; did you mean {' or '.join(near)}?" if near else message)

    def _known(self, word: str) -> bool:
        """Whether it is a command, or begins a flag, as argparse allows."""
        names = self._names(word)
        if not word.startswith("--"):
            return word in names
        return any(name.startswith(word.partition("=")[0]) for name in names)

    def _names(self, word: str) -> list[str]:
        """The flags, or the commands if the word is none of a flag."""
        if word.startswith("--"):
            return list(self._option_string_actions)
        choices = self._subparsers and self._subparsers._group_actions[0].choices
        return list(choices or ())


class _ShowVersion(argparse.Action):
    """Reads the version only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{parser.prog} {rollout_sched.__version__}")
        parser.exit()


def _write_to_nowhere() -> None:
    """Send standard output nowhere from now on, so that its flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
