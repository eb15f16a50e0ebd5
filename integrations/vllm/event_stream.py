"""Server-sent events as vLLM writes them: `data: ...` lines, apart by empty lines."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched.live.ports import InstanceError

LONGEST_LINE = 16 * 2**20  # bytes; a chunk of a thousand tokens with log-probs has 0.2 MiB


class EventStream:
    """Takes bytes as they come, gives the payloads of whole events; `[DONE]` is left out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises InstanceError for a line that does not end."""
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > LONGEST_LINE:
                raise InstanceError(f"it streamed a line of more than {LONGEST_LINE} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    yield payload
