"""Faults on demand: errors that a server can simulate, each with a probability, set at run time.

silent         accepts the request and never answers
garbage        answers 200 with a body that is not JSON
twice          answers, and then sends the answer once more
another        answers under the id of another request
unfinished     closes the connection just before the end of the answer: before a stream's [DONE],
               or before the last bytes of a whole answer
wrong_version  answers with another version than it has
reset          closes the connection instead of answering
cut            closes the connection in the middle of the answer
slow           answers `seconds` later
error_500, error_503   answers with that status
update_500     fails a weight call, which leaves the model half loaded
restart        restarts, empty, with its first weights; closes every connection
"""

from __future__ import annotations

import random
from typing import Annotated, Literal, get_args

import msgspec

Kind = Literal[
    "silent",
    "garbage",
    "twice",
    "another",
    "unfinished",
    "wrong_version",
    "reset",
    "cut",
    "slow",
    "error_500",
    "error_503",
    "update_500",
    "restart",
]
Where = Literal["generate", "weights", "control", "all"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """One switch.

    on           the calls that it affects; "control" are the others except health and models
    probability  for each of those calls; 0 switches it off
    times        how often it may still occur; None: no limit
    seconds      of the loop's clock: how long "slow" waits and "restart" is away
    struck       how often it has occurred
    """

    fault: Kind
    on: Where | None = None
    probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    struck: int = 0

    @property
    def strikes(self) -> Where:
        return self.on or ("weights" if self.fault == "update_500" else "generate")


class Switchboard:
    """All switches of one server, one for each kind, and their random numbers."""

    def __init__(self, seed: int = 0) -> None:
        self.faults: dict[Kind, Fault] = {}
        self._rng = random.Random(seed)

    def set(self, fault: Fault) -> None:
        if fault.probability:
            self.faults[fault.fault] = fault
        else:
            self.faults.pop(fault.fault, None)

    def draw(self, where: Where) -> Fault | None:
        """The fault of this call, if any: the first kind that is drawn."""
        for fault in list(self.faults.values()):
            if fault.strikes in (where, "all") and self._rng.random() < fault.probability:
                fault.struck += 1
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        del self.faults[fault.fault]
                return fault
        return None


def parse(text: str) -> Fault:
    """Parse KIND or KIND=PROBABILITY, as on the command line. Raises ValueError."""
    kind, _, probability = text.partition("=")
    try:
        return msgspec.convert({"fault": kind, "probability": float(probability or 1)}, Fault)
    except ValueError:
        raise ValueError(
            f"{text!r} is not KIND=PROBABILITY with a probability from 0 to 1 and one of the "
            f"kinds {', '.join(KINDS)}"
        ) from None
