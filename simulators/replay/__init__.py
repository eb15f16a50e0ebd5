"""The closed loop in virtual time: scenario, workload, trainer, bounds, report."""
