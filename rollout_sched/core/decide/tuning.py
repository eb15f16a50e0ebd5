"""Policy parameters that can change during a run.

The attribute `tunable` of a policy names them: numbers that it reads each time it is asked.
Policies whose answers define a sort order (routing, ordering, admission, prediction), and bounds
that the user sets (freshness), do not change during a run.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rollout_sched.core.decide.dispatch import Migrator
from rollout_sched.core.decide.lending import Lender
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import Retuned
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.state.selection import SelectionWindow

#: Role -> parameter -> value.
Parameters = dict[str, dict[str, int | float]]

TUNABLE_ROLES: Final = ("batching", "selection", "migration", "lending")


def check_parameters(roles: Roles, parameters: Parameters) -> None:
    """Raises CallerError for parameters that cannot change, or not to the given value."""
    for role, values in parameters.items():
        if role not in TUNABLE_ROLES:
            raise CallerError(
                f"{role} cannot change during a run; parameters of {', '.join(TUNABLE_ROLES)} can"
            )
        tuned(role, getattr(roles, role), values)


def tuned(role: str, policy: Any, values: dict[str, int | float]) -> Any:
    """The same policy with these values. Raises CallerError."""
    for name in values:
        if name not in policy.tunable:
            known = ", ".join(policy.tunable) or "none"
            raise CallerError(
                f"{role}.{name} of {type(policy).__name__} cannot change during a run; "
                f"parameters that can: {known}"
            )
    try:
        return msgspec.convert({**msgspec.structs.asdict(policy), **values}, type(policy))
    except ValueError as error:
        raise CallerError(f"{role} of {type(policy).__name__}: {error}") from error


class Tuning:
    """Replaces policies by copies with other parameters.

    told  every value that differs from the policy file
    """

    def __init__(
        self, roles: Roles, migrator: Migrator, lender: Lender, window: SelectionWindow
    ) -> None:
        self.told: Parameters = {}
        self._roles = roles
        self._migrator = migrator
        self._lender = lender
        self._window = window

    def retuned(self, event: Retuned, now: float) -> None:
        self._change(event.parameters)

    def restore(self, parameters: Parameters) -> None:
        """Apply what an earlier scheduler of the run was told, unless the policy file has changed
        so that it no longer applies."""
        try:
            check_parameters(self._roles, parameters)
        except CallerError:
            return
        self._change(parameters)

    def _change(self, parameters: Parameters) -> None:
        roles = self._roles
        for role, values in parameters.items():
            setattr(roles, role, tuned(role, getattr(roles, role), values))
            self.told = {**self.told, role: {**self.told.get(role, {}), **values}}
        self._migrator.migration = roles.migration
        self._lender.lending = roles.lending
        self._window.selection = roles.selection
