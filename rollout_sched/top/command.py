"""The command `rollout-sched top`: one screen, or one after the other until it is interrupted."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rollout_sched.top.document import Document
from rollout_sched.top.screen import screen
from rollout_sched.top.source import KEY, Away, GatewaySource

#: Lines of a screen that are not instances, about.
REST = 24

#: Instances that are shown, at least, however small the terminal is.
LEAST = 5


def add(commands: Any) -> None:
    """The command and its options, for an argparse parser of commands."""
    parser = commands.add_parser(
        "top",
        help="a gateway at work: fleet, queue, steps, waste",
        description=f"Asks with the administrator's key that is in {KEY}, if there is one.",
    )
    parser.add_argument("url", metavar="URL", help="of the gateway")
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="default: %(default)g"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError if the gateway refuses to tell, or Away if it does not answer `--once`."""
    source, console = GatewaySource(options.url, os.environ.get(KEY, "")), Console()
    if options.once:
        document = source.ask()
        console.print(screen(document, source.url, most=len(document.instances)))
        return
    watch(source, console, options.every)


def watch(source: GatewaySource, console: Console, every_s: float) -> None:
    """Until Ctrl-C. A gateway that goes away is asked again until it is back."""
    shown = Watched(source)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown.look(console.height), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


class Watched:
    """What is known of a gateway, whether it answers or not."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source
        self._last: Document | None = None

    def look(self, height: int) -> RenderableType:
        """The screen, on a terminal of so many lines. Raises CallerError."""
        away = ""
        try:
            self._last = self._source.ask()
        except Away as error:
            away = str(error)
        if self._last is None:
            return Text(f"{self._source.url}: no answer yet: {away}", "bold red")
        return screen(self._last, self._source.url, max(LEAST, height - REST), away)
