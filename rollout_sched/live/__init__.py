"""The asyncio driver: a scheduler in front of a fleet, and a trainer in front of the scheduler."""

from rollout_sched.live import ports
from rollout_sched.live.driver import Driver, Front
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.live_scheduler import LiveScheduler, settings_of
from rollout_sched.live.ports import with_timeout
from rollout_sched.live.settings import RunOptions, Settings

__all__ = [
    "Driver",
    "EventPump",
    "Front",
    "LiveScheduler",
    "RunOptions",
    "Settings",
    "ports",
    "settings_of",
    "with_timeout",
]
