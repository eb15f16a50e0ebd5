"""All routes of the gateway except the three that generate, over aiohttp."""

from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance

__all__ = ["NewInstance"]
