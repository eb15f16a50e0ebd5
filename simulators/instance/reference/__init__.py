"""The simulated instance step by step and block by block: slow, plain, the oracle for the jump.

It has the methods of `SimInstance` and shares with it what is passed to them and comes back
(requests, outcomes, the inbox) and the cost of one step, but nothing of how steps are decided,
counted or jumped.
"""
