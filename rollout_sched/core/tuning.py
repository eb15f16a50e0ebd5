"""Parameters of a policy that change while it runs.

A policy says by `tunable` which of its parameters may: numbers that it looks at each time it is
asked. What is kept in order by a policy's answers (routing, ordering, admission, prediction), and
what the user bounds (freshness), is not changed in a run.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Retuned
from rollout_sched.core.lender import Lender
from rollout_sched.core.migrator import Migrator
from rollout_sched.core.roles import Roles
from rollout_sched.core.selection_window import SelectionWindow

#: Role -> parameter -> value.
Parameters = dict[str, dict[str, int | float]]

TUNABLE_ROLES: Final = ("batching", "selection", "migration", "lending")


def check_parameters(roles: Roles, parameters: Parameters) -> None:
    """Raises CallerError for what cannot be changed, or not to that value."""
    for role, values in parameters.items():
        if role not in TUNABLE_ROLES:
            raise CallerError(
                f"{role} does not change while it runs; parameters of {', '.join(TUNABLE_ROLES)} do"
            )
        tuned(role, getattr(roles, role), values)


def tuned(role: str, policy: Any, values: dict[str, int | float]) -> Any:
    """The same policy with these values. Raises CallerError."""
    tunable = getattr(policy, "tunable", ())
    for name in values:
        if name not in tunable:
            known = ", ".join(tunable) or "none"
            raise CallerError(
                f"{role}.{name} of {type(policy).__name__} does not change while it runs; "
                f"parameters that do: {known}"
            )
    try:
        return msgspec.convert({**msgspec.structs.asdict(policy), **values}, type(policy))
    except ValueError as error:
        raise CallerError(f"{role} of {type(policy).__name__}: {error}") from error


class Tuning:
    """Hands a policy with other parameters to who asks it.

    told  every value that is other than the policy file's
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
        """What an earlier scheduler of the run was told, unless the policy file has become another
        one to which that does not apply."""
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
