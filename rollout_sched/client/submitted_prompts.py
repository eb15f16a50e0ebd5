"""What a trainer has asked a gateway for and has not received: a restart may have forgotten it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_sched.core.errors import CallerError
from rollout_sched.live.samples import Batch

#: As many names as a line of an error holds; `uids` has them all.
SHOWN = 5


class ForgottenPrompts(CallerError):
    """The gateway was restarted, and does not know of these prompts any more: submit them again.

    uids  of all of them, in the order in which they were submitted
    """

    def __init__(self, uids: Sequence[str]) -> None:
        self.uids = list(uids)
        shown = ", ".join(map(repr, self.uids[:SHOWN]))
        more = f" and {len(self.uids) - SHOWN} more" if len(self.uids) > SHOWN else ""
        super().__init__(
            f"the gateway was restarted, and does not know {len(self.uids)} of the prompts that "
            f"were submitted: {shown}{more}; submit those in `uids` of this error again, and start "
            f"the gateway with --store, which remembers them"
        )


class SubmittedPrompts:
    """The groups that have neither come in a batch nor been lost, by uid."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def add(self, uids: Iterable[str]) -> None:
        self._open.update(dict.fromkeys(uids))

    def received(self, batch: Batch) -> None:
        """A group comes whole, or never."""
        self.remove([sample.uid for sample in batch.samples])
        self.remove([group.uid for group in batch.failed])
        self.remove(batch.filtered)

    def remove(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._open.pop(uid, None)

    @property
    def uids(self) -> list[str]:
        """In the order in which they were submitted."""
        return list(self._open)
