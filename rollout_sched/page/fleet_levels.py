"""Records how busy a fleet is over time."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.events import InstanceReported
from rollout_sched.page.levels import LevelSeries


class FleetLevels:
    """Requests in flight, waiting in the scheduler and queued in the instances; KV usage."""

    def __init__(self) -> None:
        self._series = {
            name: LevelSeries() for name in ("in_flight", "waiting", "queued", "kv", "kv_most")
        }
        self._reports: dict[str, InstanceReported] = {}
        self._reported_s = 0.0

    def set(self, now: float, in_flight: int, waiting: int) -> None:
        self._series["in_flight"].set(now, in_flight)
        self._series["waiting"].set(now, waiting)

    def gone(self, instance: str) -> None:
        self._reports.pop(instance, None)

    def report(self, now: float, event: InstanceReported) -> None:
        if now > self._reported_s:
            self._look()  # once per time: many instances report at the same time
            self._reported_s = now
        self._reports[event.instance] = event

    def told(self, end_s: float) -> dict[str, Any]:
        self._look()
        levels: dict[str, Any] = {
            name: series.means(end_s) for name, series in self._series.items()
        }
        levels["kv_most"] = self._series["kv_most"].peaks(end_s)
        return {"width_s": self._series["in_flight"].width_s, **levels}

    def _look(self) -> None:
        """Set the levels from the latest reports of all instances."""
        reports = self._reports.values()
        if reports:
            now, usages = self._reported_s, [report.kv_usage for report in reports]
            self._series["queued"].set(now, sum(report.waiting for report in reports))
            self._series["kv"].set(now, sum(usages) / len(usages))
            self._series["kv_most"].set(now, max(usages))
