"""How many tokens of KV cache the instances hold, and so what fits where."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.core.model import Instance, Request


class KvSizes:
    """In tokens.

    largest  of the instances that are here; None if there are none
    most     of all that were ever here
    unlike   not all that are here hold as much as that
    """

    def __init__(self) -> None:
        self.largest: int | None = None
        self.most = 0
        self.unlike = False

    def measure(self, instances: Iterable[Instance]) -> None:
        """These are here now."""
        sizes = [instance.kv_tokens for instance in instances]
        self.largest = max(sizes, default=None)
        self.most = max([self.most, *sizes])
        self.unlike = any(size < self.most for size in sizes)

    def fits(self, request: Request, instance: Instance) -> bool:
        """Whether all that the request may become fits there, or as much as ever fits anywhere.

        One that fitted an instance that is gone waits for another, rather than be cut short.
        """
        needed = request.context_tokens + request.remaining_tokens
        return instance.kv_tokens >= needed or instance.kv_tokens >= self.most
