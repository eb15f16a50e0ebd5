"""What clients may have here at once."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """More is refused for now, or for ever if it could never fit.

    requests    responses that clients wait for
    body_bytes  of the bodies that go to instances for them
    samples     responses that one call may ask for: it is taken in one go, while all others wait
    """

    requests: int = 100_000
    body_bytes: int = 4 * 2**30
    samples: int = 1024
    retry_after_s: int = 1
