"""The page of a live run: empty, until it is told what happens."""

from __future__ import annotations

from rollout_sched.metrics.attempt_spans import OUTCOMES
from rollout_sched.metrics.waits import CAUSES, SINCE
from rollout_sched.page.assembly import page


def live_page() -> bytes:
    """It asks for the administrator's key, and then the server it came from for what happens."""
    words = {"since": SINCE, "causes": CAUSES, "outcomes": OUTCOMES}
    return page("rollout_sched, live", "live", {"words": words}, connects=True)
