"""The page of a live run; it is empty until the gateway sends its state."""

from __future__ import annotations

from rollout_sched.metrics.attempt_spans import OUTCOMES
from rollout_sched.metrics.waits import CAUSES, SINCE
from rollout_sched.page.assembly import page


def live_page() -> bytes:
    """A page that asks for the administrator's key and then requests the state from its server."""
    words = {"since": SINCE, "causes": CAUSES, "outcomes": OUTCOMES}
    return page("rollout_sched, live", "live", {"words": words}, connects=True)
