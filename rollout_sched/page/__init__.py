"""Makes pages for a browser, each one file without external resources; `assets` draws them."""

from rollout_sched.page import live_page, run_page
from rollout_sched.page.assembly import page

__all__ = [
    "live_page",
    "page",
    "run_page",
]
