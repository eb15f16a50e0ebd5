"""`python -m rollout_sched` is `rollout-sched`."""

from __future__ import annotations

import sys

from rollout_sched.cli import main

sys.exit(main())
