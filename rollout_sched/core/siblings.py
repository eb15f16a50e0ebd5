"""Direct requests that differ only by chance: the length of one helps to predict the others.

A client that waits for one response belongs to no batch. Its siblings are the current requests with
the same group name, prompt length and limit; others do not help the prediction.
"""

from __future__ import annotations

from rollout_sched.core.model import Request, Siblings

#: Siblings per set. Each answer updates all of them, so without a bound a client that never changes
#: its group would make every request more expensive than the one before.
MOST_SIBLINGS = 64


class DirectSiblings:
    """The sibling sets that a new direct request can join."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], Siblings] = {}

    def __len__(self) -> int:
        return len(self._open)

    def values(self) -> list[Siblings]:
        return list(self._open.values())

    def join(self, name: str, prompt_tokens: int, max_tokens: int) -> Siblings:
        """The siblings that the request joins; it is counted there."""
        key = (name, prompt_tokens, max_tokens)
        siblings = self._open.get(key)
        if siblings is None or siblings.joined >= MOST_SIBLINGS:
            siblings = self._open[key] = Siblings(name, prompt_tokens, max_tokens)
        siblings.joined += 1
        return siblings

    def leave(self, request: Request) -> None:
        """The request is over."""
        siblings = request.siblings
        siblings.requests.remove(request)
        key = (siblings.id, siblings.prompt_tokens, siblings.max_tokens)
        if not siblings.requests and self._open.get(key) is siblings:
            del self._open[key]
