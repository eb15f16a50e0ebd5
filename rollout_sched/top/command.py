"""The command `rollout-sched top`: prints one screen, or refreshes it until it is interrupted."""

from __future__ import annotations

import argparse
import os
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from rollout_sched.core.model.errors import CallerError, RolloutError
from rollout_sched.top.screen import SCHEMA, Document, screen

# ------------------------------------------------------------------------------------------
# Requests the live state of a gateway.

PATH = "/admin/live"

#: The environment variable that holds an administrator's key.
KEY = "ROLLOUT_SCHED_ADMIN_KEY"

#: Timeout in seconds.
PATIENCE_S = 5.0


class Away(RolloutError):
    """The gateway does not answer now, but may answer later."""


class GatewaySource:
    """One gateway; `key`: an administrator's, "" for none. Raises CallerError for a bad URL."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallerError(f"{url!r} is not a gateway's URL, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._request = urllib.request.Request(self.url + PATH, headers=headers)
        # Ignore the proxy settings of the environment: gateways are reached directly.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> Document:
        """Raises Away if the gateway does not answer, CallerError if a retry cannot help."""
        try:
            with self._opener.open(self._request, timeout=PATIENCE_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refused(error.code) from error
        except OSError as error:  # includes URLError
            raise Away(str(getattr(error, "reason", error))) from error
        try:
            return msgspec.json.decode(body, type=Document)
        except msgspec.DecodeError as error:
            raise CallerError(
                f"{self.url}{PATH} does not answer as {SCHEMA}: {error}; use the same version as "
                "the gateway's"
            ) from error

    def _refused(self, status: int) -> RolloutError:
        if status in (401, 403):
            return CallerError(
                f"{self.url} needs an administrator's key ({status}): set it as {KEY} in the "
                "environment"
            )
        if status == 404:
            return CallerError(f"{self.url} has no {PATH}: it is not a gateway, or an older one")
        return Away(f"the gateway answered {status}")


#: Approximate number of lines of a screen that are not instances.
REST = 24

#: Fewest instances that are shown, however small the terminal is.
LEAST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Uses the administrator's key in the environment variable {KEY}, if set."
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
        console.print(screen(document, source.url, limit=len(document.instances)))
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
