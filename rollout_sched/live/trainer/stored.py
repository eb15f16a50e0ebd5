"""What the trainers' part of a run needs of a store: where facts go, and what it continues from.

The room `live.durable` implements both; a run without a store has neither.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import msgspec

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import Restored
from rollout_sched.core.model.records import RunState
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.samples import LostGroup, Prompt, Reward
from rollout_sched.store.transaction import Transaction


class TrainerStore(Protocol):
    """Where a session writes what must outlive it. Await `promise` before an answer to a caller."""

    def check_room(self) -> None:
        """Raises StoreFull if no new work can be accepted."""
        ...

    def promise(self) -> Awaitable[None]:
        """Awaiting it may raise StoreBroken."""
        ...

    def submitted(self, prompt: Prompt, tool: str | None, *, judged: bool = False) -> None:
        """`tool`: the tool's name, "" without a name; None: no tool."""
        ...

    def published(self, version: int, loader: bytes) -> None: ...

    def rewarded(self, request: str, reward: Reward) -> None: ...

    def forget_reward(self, request: str) -> None: ...

    def acknowledged(self, batch: int) -> None: ...

    def record_report(self, last: Deliver) -> None:
        """A batch after the last that only reports lost groups."""
        ...

    def lost(self, group: LostGroup, batch: int | None = None) -> None:
        """`batch`: the batch that reports it."""
        ...

    def leased(self, batch: int, lease: LeaseFacts | None) -> None:
        """None: the lease is no longer needed."""
        ...


class StoredWeights(msgspec.Struct, frozen=True):
    """The newest published version, and how to load it, as encoded by the code that loads it."""

    version: int
    loader: bytes


class Recovered(msgspec.Struct):
    """The state that a new epoch begins with.

    state        the scheduler's; None: the store was new
    prompts      of open groups, and of groups delivered but not acknowledged, by uid
    tools        names of the tools of these groups, whether given again or not; "": without a
                 name
    deliveries   not acknowledged, in order
    rewards      of the finished samples that have one, by request
    leases       of these deliveries, and of batches that a former holder may still claim, by
                 batch
    lost         lost groups that must be reported to the trainer
    reported     lost groups that are reported with a batch that is delivered again, by its
                 number
    last_report  number of the last batch that only reported lost groups; -1: there was none
    weights      the newest published; None: none were
    paused       instances that were being updated
    model        what the instances served; "": unknown
    running      attempts that may still run somewhere: (instance, attempt)
    cleanup      removes what is stored and not continued
    """

    state: RunState | None = None
    prompts: dict[str, Prompt] = {}
    tools: dict[str, str] = {}
    deliveries: list[Deliver] = []
    rewards: dict[str, Reward] = {}
    leases: dict[int, LeaseFacts] = {}
    lost: list[LostGroup] = []
    reported: dict[int, list[LostGroup]] = {}
    last_report: int = -1
    weights: StoredWeights | None = None
    paused: set[str] = set()
    model: str = ""
    running: list[tuple[str, int]] = []
    cleanup: Transaction = msgspec.field(default_factory=Transaction)

    @property
    def event(self) -> Restored | None:
        return None if self.state is None else Restored(self.state)
