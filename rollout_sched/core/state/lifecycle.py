"""The life of a request as a table.

A move that the table does not list is an error and changes nothing. Reading down: a request is
created PARKED, *returns* to the waiting queue when its group is launched, is *dispatched*, and
*finishes*. On the way it may be *interrupted*, *parked* in the replay buffer, or *act* between two
turns. It *ends* exactly once.

                launch            dispatch              finish              deliver
      PARKED ───────────▶ WAITING ────────▶ RUNNING ─────────────▶ FINISHED ───────▶ ENDED
        ▲                   ▲  ▲             │  │ └──▶ INTERRUPTING ──┘ │ │
        │   set back        │  └── ACTING ◀──┘  │            │          │ │ start over
        └───────────────────┴───────────────────┴────────────┴──────────┘ ▼ PARKED

An ACTING request goes on when its tool returns, or finishes when the tool says that no turn
follows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rollout_sched.core.errors import IllegalMove
from rollout_sched.core.model.model import Request, RequestState

# Final, so that compiled code need not look them up.
WAITING: Final = RequestState.WAITING
RUNNING: Final = RequestState.RUNNING
INTERRUPTING: Final = RequestState.INTERRUPTING
ACTING: Final = RequestState.ACTING
PARKED: Final = RequestState.PARKED
FINISHED: Final = RequestState.FINISHED
ENDED: Final = RequestState.ENDED


class Move(StrEnum):
    """The verbs of the table."""

    DISPATCH = "dispatch"  # an attempt starts
    INTERRUPT = "interrupt"  # the attempt was told to stop
    RETURN = "return"  # it may be dispatched (again)
    PARK = "park"  # it waits in the replay buffer
    ACT = "act"  # a turn is over, a tool works
    FINISH = "finish"  # the response is complete
    END = "end"  # delivered or discarded


DISPATCH: Final = Move.DISPATCH
INTERRUPT: Final = Move.INTERRUPT
RETURN: Final = Move.RETURN
PARK: Final = Move.PARK
ACT: Final = Move.ACT
FINISH: Final = Move.FINISH
END: Final = Move.END

MOVES: Final[dict[RequestState, dict[Move, RequestState]]] = {
    # A direct request may come with its whole response, from under an earlier scheduler, or be
    # aborted while it waits.
    PARKED: {RETURN: WAITING, FINISH: FINISHED, END: ENDED},
    WAITING: {DISPATCH: RUNNING, PARK: PARKED, FINISH: FINISHED, END: ENDED},
    RUNNING: {
        INTERRUPT: INTERRUPTING,
        RETURN: WAITING,
        PARK: PARKED,
        ACT: ACTING,
        FINISH: FINISHED,
        END: ENDED,
    },
    INTERRUPTING: {
        RETURN: WAITING,
        PARK: PARKED,
        ACT: ACTING,
        FINISH: FINISHED,
        END: ENDED,
    },
    ACTING: {RETURN: WAITING, PARK: PARKED, FINISH: FINISHED, END: ENDED},
    FINISHED: {PARK: PARKED, END: ENDED},
    ENDED: {},
}


def move(request: Request, verb: Move) -> None:
    """Move `request`, or raise IllegalMove and leave it as it is."""
    after = MOVES[request.state].get(verb)
    if after is None:
        raise IllegalMove(f"request {request.id} is {request.state}: it cannot {verb}")
    request.state = after
