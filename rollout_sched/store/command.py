"""`rollout-sched store`: maintenance of a store that is not in use."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollout_sched.store.salvage import salvage


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("store", help="maintain the store of a run")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("salvage", help="make a damaged store usable with its intact content")
    verb.add_argument("folder", metavar="DIR", type=Path)
    verb.set_defaults(run=_salvage)


def _salvage(options: argparse.Namespace) -> None:
    found = salvage(options.folder)
    print(f"{options.folder}: {found.facts} facts and {found.pieces} pieces of tokens are intact")
    for line in found.losses.told():
        print(line)
    print(f"unreadable content is lost; the old database is kept as {found.kept_as}")
