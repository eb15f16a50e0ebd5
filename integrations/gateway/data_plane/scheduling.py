"""The interface to which the data plane submits the requests of clients' calls."""

from __future__ import annotations

from typing import Protocol

from rollout_sched.live.ports import Payload


class Scheduling(Protocol):
    """The driver in this process (`live.driver`), or a front's link to a driver in another process
    (`link.front_calls`)."""

    def max_model_len(self) -> int:
        """Tokens of prompt and response that every instance accepts; 0 without instances."""

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
    ) -> str:
        """Ask for one response, which is answered when it is finished; returns the request's id."""

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has disconnected."""
