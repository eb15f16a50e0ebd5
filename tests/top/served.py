"""A gateway that says what it is told to say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.top.made_up import said


class Gateway:
    def __init__(self) -> None:
        self.status = 200
        self.body: bytes | None = None
        self.keys: list[str | None] = []
        self.url = ""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.keys.append(self.headers["Authorization"])
                assert self.path == "/admin/live"
                body = json.dumps(said()).encode() if gateway.body is None else gateway.body
                self.send_response(gateway.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *about: Any) -> None: ...

        return Handler


@contextmanager
def serving(port: int = 0) -> Iterator[Gateway]:
    gateway = Gateway()
    with ThreadingHTTPServer(("127.0.0.1", port), gateway.handler()) as server:
        gateway.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            server.shutdown()
            thread.join()
