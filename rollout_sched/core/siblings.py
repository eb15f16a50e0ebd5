"""Direct requests that may be told apart by nothing but chance: what one teaches helps the others.

A client that waits for one response belongs to no batch, but to the requests of equal group name,
prompt length and limit that are here with it; who differs in those is no help for prediction.
"""

from __future__ import annotations

from rollout_sched.core.model import Request, Siblings

#: Siblings that are remembered together. Each answer teaches all of them, so a client that never
#: changes its group would make every request dearer than the one before.
MOST_SIBLINGS = 64


class DirectSiblings:
    """The siblings that a new direct request would join."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], Siblings] = {}

    def __len__(self) -> int:
        return len(self._open)

    def values(self) -> list[Siblings]:
        return list(self._open.values())

    def join(self, name: str, prompt_tokens: int, max_tokens: int) -> Siblings:
        """Those it joins; they count it."""
        key = (name, prompt_tokens, max_tokens)
        siblings = self._open.get(key)
        if siblings is None or siblings.joined >= MOST_SIBLINGS:
            siblings = self._open[key] = Siblings(name, prompt_tokens, max_tokens)
        siblings.joined += 1
        return siblings

    def leave(self, request: Request) -> None:
        """It is over."""
        siblings = request.siblings
        siblings.requests.remove(request)
        key = (siblings.id, siblings.prompt_tokens, siblings.max_tokens)
        if not siblings.requests and self._open.get(key) is siblings:
            del self._open[key]
