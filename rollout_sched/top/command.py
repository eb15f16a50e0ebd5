"""The command `rollout-sched top`: prints one screen, or refreshes it until it is interrupted."""

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

#: Approximate number of lines of a screen that are not instances.
REST = 24

#: Fewest instances that are shown, however small the terminal is.
LEAST = 5


def add(commands: Any) -> None:
    """Add the command and its options to an argparse parser of commands."""
    parser = commands.add_parser(
        "top",
        help="show the live state of a gateway: fleet, queue, steps, waste",
        description=f"Uses the administrator's key in the environment variable {KEY}, if set.",
    )
    parser.add_argument("url", metavar="URL", help="URL of the gateway")
    parser.add_argument("--once", action="store_true", help="print one screen and exit")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="interval; default: %(default)g"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError if the gateway refuses the request, Away if `--once` gets no answer."""
    source, console = GatewaySource(options.url, os.environ.get(KEY, "")), Console()
    if options.once:
        document = source.ask()
        console.print(screen(document, source.url, most=len(document.instances)))
        return
    watch(source, console, options.every)


def watch(source: GatewaySource, console: Console, every_s: float) -> None:
    """Refresh the screen until Ctrl-C. A gateway that does not answer is asked again."""
    shown = Watched(source)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown.look(console.height), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


class Watched:
    """The last known state of a gateway, whether it answers or not."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source
        self._last: Document | None = None

    def look(self, height: int) -> RenderableType:
        """The screen, for a terminal of `height` lines. Raises CallerError."""
        away = ""
        try:
            self._last = self._source.ask()
        except Away as error:
            away = str(error)
        if self._last is None:
            return Text(f"{self._source.url}: no answer yet: {away}", "bold red")
        return screen(self._last, self._source.url, max(LEAST, height - REST), away)
