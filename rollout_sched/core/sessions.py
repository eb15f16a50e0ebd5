"""Sessions: the last instance of each conversation of direct requests, which has its KV cache."""

from __future__ import annotations

from collections import OrderedDict

#: Clients that never end their sessions must not fill the memory.
LIMIT = 100_000


class Sessions:
    """Session -> the instance of its last request; the least recently used are forgotten.

    `moves` counts the requests that were sent to another instance than the one before.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.moves = 0
        self._limit = limit
        self._instances: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def last_instance(self, session: str) -> str | None:
        return self._instances.get(session)

    def sent(self, session: str, instance: str) -> None:
        self.moves += self._instances.get(session, instance) != instance
        self._instances[session] = instance
        self._instances.move_to_end(session)
        if len(self._instances) > self._limit:
            self._instances.popitem(last=False)

    def end(self, session: str) -> bool:
        """False if the session is unknown."""
        return self._instances.pop(session, None) is not None
