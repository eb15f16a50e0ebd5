"""The closed loop in virtual time: scenario, workload, trainer, bounds, report."""

from rollout_sched.simulators.replay import command, runs, tables
from rollout_sched.simulators.replay.comparison import Ratio, compared, ratio_of
from rollout_sched.simulators.replay.scenario import Job, Scenario, load_scenario, parse_scenario
from rollout_sched.simulators.replay.workload import Workload

__all__ = [
    "Job",
    "Ratio",
    "Scenario",
    "Workload",
    "command",
    "compared",
    "load_scenario",
    "parse_scenario",
    "ratio_of",
    "runs",
    "tables",
]
