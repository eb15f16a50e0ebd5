"""A file that names instances: accepted, or refused with an error that names the file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.endpoints_file import parse_endpoints
from tests.fuzz.laws import hold

_YAML = b"""endpoints:
- name: one
  address: 10.0.0.7
  port: 8000
  labels: {role: decode}
- {address: "fd00::1", port: "8001", since: 2026-11-23}
"""


class EndpointsFiles:
    """The first byte selects YAML or JSON."""

    name = "endpoints"
    corpus: Sequence[bytes] = (
        b"",
        b"y" + _YAML,
        b'j{"endpoints": [{"address": "10.0.0.7", "port": 8000, "labels": {"role": "decode"}}]}',
    )
    words = (
        *(b"endpoints:", b"address: ", b"port: ", b"\n- ", b"  ", b"{", b"}", b"[", b"]", b", "),
        *(b"!!bool x", b'!!int ""', b"!!timestamp x", b"!!python/name:os.system", b"2026-13-45"),
        *(b"&a ", b"*a", b"<<: ", b"? ", b"---\n", b"...", b"|\n", b"null", b"~", b"on", b".nan"),
        *(b"::1", b"fe80::1%eth0", b"http://", b":8000", b"0x1f", b"1:2:3", b"9" * 5000),
        *(b"[" * 2000, b"\xef\xbb\xbf", b"\\ud800", b'"', b"'", b"#"),
    )

    def make(self, rng: random.Random) -> bytes:
        """A list of endpoints as JSON, which is also YAML."""
        values: list[Any] = ["a", "10.0.0.7", "::1", "a:1", "", 0, 80, "80", 1e9, True, None, []]
        endpoints = [
            {
                key: rng.choice(values)
                for key in ("name", "address", "port", "labels")
                if rng.random() < 0.9
            }
            for _ in range(rng.randrange(4))
        ]
        return rng.choice((b"y", b"j")) + json.dumps({"endpoints": endpoints}).encode()

    def check(self, data: bytes) -> None:
        path = Path("fleet.json" if data[:1] == b"j" else "fleet.yaml")
        try:
            endpoints = parse_endpoints(path, data[1:])
        except CallerError as error:
            told = str(error)
            hold("an error starts with the file name", told.startswith(f"{path}: "), told)
            hold("an error is one short line", len(told) < 2000 and "\n" not in told, told)
            return
        urls = [endpoint.url for endpoint in endpoints]
        hold("each instance is listed once", len(urls) == len(set(urls)), urls)

    def spend(self, data: bytes) -> None:
        try:
            parse_endpoints(Path("fleet.yaml"), data[1:])
        except CallerError:
            return
