"""Errors, by who is at fault. A module of its own, because exceptions are not compiled."""


def reason_of(error: Exception) -> str:
    """What is wrong, without the number and the file that Python puts around it in an OSError."""
    said = getattr(error, "strerror", None)
    return said[0].lower() + said[1:] if said else str(error)


class RolloutError(Exception):
    """The base class of all errors that rollout_sched raises on purpose."""

    _unquoted = ""

    @property
    def unquoted(self) -> str:
        """The text for logs: without contents of requests and answers."""
        return self._unquoted or str(self)


class CallerError(RolloutError, ValueError):
    """The caller asked for something impossible; nothing was changed. The text gives the remedy."""


class PolicyError(RolloutError, RuntimeError):
    """A policy returned a decision that is not allowed, such as a closed instance."""


class IllegalMove(RolloutError, RuntimeError):
    """The life-cycle table has no such move for the request or group; its state did not change."""
