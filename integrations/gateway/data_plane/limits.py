"""The limits on what clients may have in the gateway at once."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """A call beyond a limit is refused: for now, or permanently if it could never fit.

    requests    responses that clients wait for
    body_bytes  bytes of the bodies that are sent to instances for them
    samples     responses that one call may ask for: all are submitted at once while others wait
    """

    requests: int = 100_000
    body_bytes: int = 4 * 2**30
    samples: int = 1024
    retry_after_s: int = 1
