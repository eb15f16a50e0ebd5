"""Tracks submitted prompts that were not received yet: a restarted gateway may have lost them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.trainer.samples import Batch

#: Number of uids shown in the error text; `uids` has all of them.
SHOWN = 5


class ForgottenPrompts(CallerError):
    """The gateway was restarted and no longer knows these prompts: submit them again.

    uids  the uids of all of them, in the order of submission
    """

    def __init__(self, uids: Sequence[str]) -> None:
        self.uids = list(uids)
        shown = ", ".join(map(repr, self.uids[:SHOWN]))
        more = f" and {len(self.uids) - SHOWN} more" if len(self.uids) > SHOWN else ""
        super().__init__(
            f"the gateway was restarted and has lost {len(self.uids)} of the submitted prompts: "
            f"{shown}{more}; submit those in `uids` of this error again. To keep prompts across "
            f"restarts, start the gateway with --store"
        )


class SubmittedPrompts:
    """The submitted groups that were neither received in a batch nor lost, by uid."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def add(self, uids: Iterable[str]) -> None:
        self._open.update(dict.fromkeys(uids))

    def received(self, batch: Batch) -> None:
        """A group is received whole or not at all."""
        self.remove([sample.uid for sample in batch.samples])
        self.remove([group.uid for group in batch.failed])
        self.remove(batch.filtered)

    def remove(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._open.pop(uid, None)

    @property
    def uids(self) -> list[str]:
        """In the order of submission."""
        return list(self._open)
