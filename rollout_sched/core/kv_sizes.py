"""The KV cache sizes of the instances in tokens, and so which request fits where."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.core.model import Instance, Request


class KvSizes:
    """Sizes in tokens.

    largest  of the current instances; None if there are none
    most     of all instances so far
    unlike   whether some current instance holds less than `most`
    """

    def __init__(self) -> None:
        self.largest: int | None = None
        self.most = 0
        self.unlike = False

    def measure(self, instances: Iterable[Instance]) -> None:
        """Take the sizes of the current instances."""
        sizes = [instance.kv_tokens for instance in instances]
        self.largest = max(sizes, default=None)
        self.most = max([self.most, *sizes])
        self.unlike = any(size < self.most for size in sizes)

    def fits(self, request: Request, instance: Instance) -> bool:
        """Whether the instance holds all that the request may become, or as much as any so far.

        A request that fitted only on an instance that has gone waits for another one of that size,
        so that its response is not cut short.
        """
        needed = request.context_tokens + request.remaining_tokens
        return instance.kv_tokens >= needed or instance.kv_tokens >= self.most
