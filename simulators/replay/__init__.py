"""The closed loop in virtual time: scenario, workload, trainer, and what a run is held against."""
