"""Keeps an endpoints file what a headless Service is: follow_service.py SERVICE PORT FILE.

Where DNS answers nothing, or names nobody, the file stays as it is: a name server that is away must
not cost a fleet that is there.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 5.0


def addresses(service: str, port: int) -> list[str]:
    """Of its pods; none where DNS does not say."""
    try:
        found = socket.getaddrinfo(service, port, type=socket.SOCK_STREAM)
    except OSError as error:
        print(f"{service}: {error}; the endpoints stay as they are", file=sys.stderr, flush=True)
        return []
    return sorted({str(address[0]) for *_, address in found})


def write(path: Path, pods: Sequence[str], port: int) -> None:
    """As a whole: a reader finds the file as it was or as it is."""
    endpoints = [{"address": address, "port": port} for address in pods]
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(json.dumps({"endpoints": endpoints}))
    draft.replace(path)


def look(service: str, port: int, path: Path) -> None:
    pods = addresses(service, port)
    if pods or not path.exists():  # the gateway does not start without a file
        write(path, pods, port)


if __name__ == "__main__":
    while True:
        look(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
        time.sleep(POLL_S)
