"""The simulated instance step by step and block by block: slow, simple, the oracle for the jump.

It has the methods of `SimInstance`. Both share the inputs and outcomes (requests, outcomes, the
inbox) and the cost of one step, but nothing of how steps are decided, counted or jumped.
"""

from rollout_sched.simulators.instance.reference.instance import ReferenceInstance

__all__ = [
    "ReferenceInstance",
]
