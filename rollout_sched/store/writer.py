"""A thread that writes to a store, so that an event loop waits only for what it has promised."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread

from rollout_sched.store.disk import is_full
from rollout_sched.store.errors import StoreBroken, StoreFull
from rollout_sched.store.store import Store
from rollout_sched.store.transaction import Transaction

log = logging.getLogger(__name__)

#: Seconds to gather changes that are not promised, because each transaction has a cost.
GATHER_S = 0.02

#: Seconds between two tries to write, and between two checks for room, while the disk is full.
AGAIN_S = 0.5

#: Free bytes that are needed to accept new work: work in progress must have room to finish.
HEADROOM = 2**26

#: Most bytes that may wait for the disk before new work is refused.
MAX_WAITING = 2**28


_CLOSED = "the store was closed"


class StoreWriter:
    """Applies changes to a store, in order; changes that wait together go in one transaction.

    `full`: why no new work is accepted, "" if it is; earlier changes are written as soon as there
    is room. `broken`: the disk has failed for good; nothing more is written, open promises fail,
    and `on_broken` is called once, from the thread.
    """

    def __init__(self, store: Store, on_broken: Callable[[StoreBroken], None]) -> None:
        self.store = store
        self.full = ""
        self.broken: StoreBroken | None = None
        self._on_broken = on_broken
        self._waiting: list[Transaction] = []
        self._waiting_bytes = 0
        self._promises: list[Future[None]] = []
        self._closing = False
        self._at_disk: float | None = None  # since when the thread waits for it
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def write(self, changes: Transaction) -> None:
        """Write changes soon, without waiting. Later ones are never in the store without them."""
        with self._changed:
            if self.broken is None:
                self._append(changes)
                self._changed.notify()

    def promise(self, changes: Transaction | None = None) -> Future[None]:
        """Write changes; the future is done when they, and all earlier ones, are as durable as
        configured. It fails with StoreBroken."""
        promise: Future[None] = Future()
        with self._changed:
            if self.broken is not None or self._closing:
                promise.set_exception(self.broken or StoreBroken(_CLOSED))
                return promise
            if changes is not None:
                self._append(changes)
            self._promises.append(promise)
            self._changed.notify()
        return promise

    @property
    def hangs_s(self) -> float:
        """Seconds for which the disk has not answered."""
        since = self._at_disk
        return 0.0 if since is None else time.monotonic() - since

    def check_room(self) -> None:
        """Raises StoreFull if no new work is accepted now, StoreBroken if it never will be."""
        if self.broken is not None:
            raise self.broken
        if self.full:
            raise StoreFull(self.full)
        if self._waiting_bytes > MAX_WAITING:
            raise StoreFull(
                f"store {self.store.folder}: {self._waiting_bytes} bytes wait because its disk "
                "does not keep up; submit less at once, or use a faster disk"
            )

    def close(self) -> None:
        """Write the remaining changes and close the store. A full disk gets one more try."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        try:
            self.store.close()
        except (OSError, sqlite3.Error) as error:
            self._fail(error, [])

    def _append(self, changes: Transaction) -> None:
        """Queue changes; the thread merges them into one transaction."""
        self._waiting.append(changes)
        self._waiting_bytes += changes.size

    # -- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        changes, promises = Transaction(), list[Future[None]]()
        settled = False  # whether all written changes are as durable as can be promised
        while True:
            more, asked, closing = self._next(again=bool(changes or promises))
            for later in more:
                changes.add(later)
            promises += asked
            self._at_disk = time.monotonic()
            try:
                if changes or (promises and not settled):
                    self.store.apply(changes, promised=bool(promises))
                    settled = bool(promises)
                    changes = Transaction()
                self._kept(promises)
                promises = []
                self.store.tidy()
                self._look_for_room()
            except Exception as error:
                if not is_full(error):
                    self._fail(error, promises)
                    return
                self._no_room(str(error))
            self._at_disk = None
            if closing:
                self._break(promises, StoreBroken(self.full or _CLOSED))
                return

    def _next(self, *, again: bool) -> tuple[list[Transaction], list[Future[None]], bool]:
        """The next changes to write; it waits for them, and gathers more unless one is promised."""
        with self._changed:
            if again or self.full:
                self._changed.wait_for(lambda: self._closing, AGAIN_S)
            else:
                self._changed.wait_for(lambda: self._waiting or self._promises or self._closing)
                if self.store.durable != "event":
                    self._changed.wait_for(lambda: self._promises or self._closing, GATHER_S)
            changes, self._waiting, self._waiting_bytes = self._waiting, [], 0
            promises, self._promises = self._promises, []
            return changes, promises, self._closing

    def _kept(self, promises: list[Future[None]]) -> None:
        for promise in promises:
            if promise.set_running_or_notify_cancel():
                promise.set_result(None)

    def _look_for_room(self) -> None:
        room = self.store.disk.room(self.store.folder)
        if room < HEADROOM:
            self._no_room(f"{room} bytes are free")
        elif self.full:
            self.full = ""
            log.warning("store %s: the disk has room again", self.store.folder)

    def _no_room(self, why: str) -> None:
        if not self.full:
            self.full = (
                f"store {self.store.folder}: the disk is full ({why}): no new prompts are taken "
                f"until {HEADROOM} bytes are free; requests in flight go on"
            )
            log.error("%s", self.full)

    def _fail(self, error: Exception, promises: list[Future[None]]) -> None:
        broken = StoreBroken(
            f"store {self.store.folder} cannot be written: {error!r}; earlier data is safe: "
            "restart on the same store once the disk works"
        )
        log.critical("%s", broken)
        with self._changed:
            self.broken = broken
            promises = promises + self._promises
            self._promises = []
        self._break(promises, broken)
        self._on_broken(broken)

    def _break(self, promises: list[Future[None]], why: StoreBroken) -> None:
        for promise in promises:
            if promise.set_running_or_notify_cancel():
                promise.set_exception(why)
