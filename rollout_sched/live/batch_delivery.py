"""Batches on their way to the trainer: each is kept until all of it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rollout_sched.live.samples import Batch


class NotYet(Exception):
    """Nothing had come in time; ask again."""


class BatchDelivery:
    """One batch at a time: it is requested, comes as a whole or in parts, and is acknowledged, and
    then the next one is.

    Whoever asks says what has arrived, and gets what follows it; so a connection or a wait that
    breaks off loses nothing, and nothing comes twice. The parts of a batch are kept until all of it
    has arrived: a trainer that starts anew, whose gradients are gone, gets the batch from its
    first part on.

    `request(parts)` is called to ask for a batch, as a whole or in parts, and once more where that
    changes; what comes of it is told by `deliver` or `fail`, then or later. `acknowledged` is
    called with the number of a batch of which all has arrived.

    `expected`: what is made, and will be delivered once it is in a store.
    """

    def __init__(
        self,
        request: Callable[[bool], None],
        acknowledged: Callable[[int], None] | None = None,
    ) -> None:
        self._request = request
        self._acknowledged = acknowledged
        self._requested: bool | None = None  # in parts, or as a whole; None: not yet
        self._parts: list[Batch] = []  # of the present batch
        self.expected: list[Batch] = []
        self._over = False
        self._error: Exception | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def restore(self, parts: list[Batch], requested: bool | None) -> None:
        """What an earlier run had handed out and was not told the arrival of, and whether a batch
        was asked for, in parts or as a whole."""
        self._parts = parts
        self._requested = requested

    @property
    def awaited(self) -> bool:
        """Whether a batch was requested and is not whole."""
        return self._requested is not None and not (self._ended or self._whole)

    @property
    def uids(self) -> set[str]:
        """The groups that were handed out, or will be, and are not acknowledged."""
        lost = {group.uid for part in self._here for group in part.failed}
        return self.made | lost | {uid for part in self._here for uid in part.filtered}

    @property
    def made(self) -> set[str]:
        """Those of them whose samples are there: they need not be made again."""
        return {sample.uid for part in self._here for sample in part.samples}

    @property
    def _here(self) -> list[Batch]:
        return [*self._parts, *self.expected]

    @property
    def begun(self) -> bool:
        """Whether a part of a batch has come, and not the last one."""
        return bool(self._parts) and not self._whole

    async def next(
        self,
        acknowledged: int | None,
        timeout_s: float | None,
        *,
        part: int | None = None,
        parts: bool = False,
    ) -> Batch | None:
        """What follows the batch `acknowledged`, its number, of which all has arrived, or the parts
        up to `part`: the rest of that batch, or the next one; None when nothing is left.

        All of a batch as one; with `parts` what of it is whole. Without the number of what was
        handed out last, that comes again. Raises NotYet after `timeout_s` seconds; what comes then
        waits for the next call.
        """
        if acknowledged is not None:
            self._acknowledge(acknowledged, part)
        self._ask(parts)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self._closed or self._ended or self._after(acknowledged, part, parts)):
                    await self._changed.wait()
        found = self._after(acknowledged, part, parts)
        if self._closed:
            raise NotYet
        if found:
            return _joined(found)
        if self._error is not None:
            raise self._error
        if not self._over:
            raise NotYet
        return None

    def expect(self, batch: Batch) -> None:
        """It is delivered soon, and before any other."""
        self.expected.append(batch)

    def deliver(self, batch: Batch | None) -> None:
        """A batch, or its next part, to whoever asks; None, nothing is left, for ever."""
        if batch is None:
            self._over = True
        else:
            self._parts.append(batch)
            self.expected = [other for other in self.expected if other is not batch]
        self._change()

    def fail(self, error: Exception) -> None:
        """There will be no more; a request for another would fail too."""
        self._error = error
        self._change()

    def close(self) -> None:
        """Send away who waits."""
        self._closed = True
        self._change()

    @property
    def _whole(self) -> bool:
        return bool(self._parts) and self._parts[-1].last

    @property
    def _ended(self) -> bool:
        return self._over or self._error is not None

    def _after(self, acknowledged: int | None, part: int | None, parts: bool) -> list[Batch]:
        """The parts that follow what has arrived, once they may be handed out."""
        here = self._parts
        arrived = 0
        if here and here[0].number == acknowledged and part is not None and 0 <= part < len(here):
            arrived = part + 1
        return here[arrived:] if parts or self._whole else []

    def _acknowledge(self, number: int, part: int | None) -> None:
        """An acknowledgement that comes twice does not count for the batch after."""
        if (
            self._whole
            and self._parts[-1].number == number
            and part in (None, len(self._parts) - 1)
        ):
            self._parts, self._requested = [], None
            if self._acknowledged is not None:
                self._acknowledged(number)

    def _ask(self, parts: bool) -> None:
        before = self._requested
        if self._whole or self._ended or before == parts:
            return
        self._requested = parts
        try:
            self._request(parts)
        except BaseException:
            self._requested = before
            raise

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _joined(parts: list[Batch]) -> Batch:
    """Parts that follow one another, as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return Batch(
        last.number,
        last.version,
        [sample for part in parts for sample in part.samples],
        [failed for part in parts for failed in part.failed],
        last.part,
        last.last,
        [uid for part in parts for uid in part.filtered],
        last.missing,
    )
