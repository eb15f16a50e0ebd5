"""Which servers an example may learn from."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_servers import check_real
from rollout_sched.core.errors import CallerError


@contextmanager
def serving(models: Any) -> Iterator[str]:
    """A server of one answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(models).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_one_that_serves_the_model(tmp_path: Path) -> None:
    with serving({"data": [{"root": str(tmp_path / ".")}]}) as url:
        check_real(url, tmp_path)


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"data": [{"root": "another"}]}, "serves another, not the weights in"),
        ({"data": []}, "cannot read which model"),
        ("hello", "cannot read which model"),
    ],
)
def test_one_that_does_not(tmp_path: Path, models: Any, says: str) -> None:
    with serving(models) as url, pytest.raises(CallerError, match=says):
        check_real(url, tmp_path)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot read which model"):
        check_real("http://127.0.0.1:1", tmp_path)
