"""Errors, by whose fault they are; a module of its own because no exception is compiled."""


class RolloutError(Exception):
    """The root of every error rollout_sched raises on purpose."""


class CallerError(RolloutError, ValueError):
    """The caller asked for something impossible; nothing was changed. The text says what to do."""


class PolicyError(RolloutError, RuntimeError):
    """A policy answered with something that may not be done, such as a closed instance."""


class IllegalMove(RolloutError, RuntimeError):
    """A request was asked to move in a way the life-cycle table does not know; it did not move."""
