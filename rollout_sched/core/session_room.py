"""Which instances may take a new session, if the admission bounds sessions."""

from __future__ import annotations

from rollout_sched.core.events import InstanceReported
from rollout_sched.core.model import Instance, Request
from rollout_sched.core.roles import SessionAdmission


class SessionRoom:
    """`taking` counts the open instances that take new sessions (`Instance.takes_new`).

    bound    the admission that bounds sessions; None if there is none
    """

    def __init__(self, bound: SessionAdmission | None) -> None:
        self.bound = bound
        self.taking = 0

    def may_begin(self, request: Request, instance: Instance) -> bool:
        """Whether there is room; a request that has KV somewhere is not checked."""
        return instance.takes_new or self.bound is None or request.home is not None

    def observe(self, instance: Instance, report: InstanceReported) -> None:
        if self.bound is not None:
            instance.observed = self.bound.observe(instance, report)

    def update(self, instance: Instance) -> None:
        """The instance is open, and something has changed."""
        if self.bound is not None:
            self._take_new(instance, self.bound.begins(instance))

    def close(self, instance: Instance) -> None:
        """The instance is no longer open."""
        self._take_new(instance, False)

    def _take_new(self, instance: Instance, takes_new: bool) -> None:
        self.taking += takes_new - instance.takes_new
        instance.takes_new = takes_new
