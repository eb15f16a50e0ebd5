"""The decoding attempts of an instance, and the arithmetic of the event jump.

While nobody joins or leaves, every attempt gains one token per step. With shift = tokens - step, a
constant, everything needed follows without a look at each attempt:

* the sum of their contexts is (sum of shifts) + (how many) * step,
* an attempt ends with step goal - shift, so a list sorted by that step finds the next end,
* it needs a new block in the step after boundary b if the tokens computed so far, shift + b - 1,
  fill whole blocks: if b = 1 - shift modulo the block size. So counting the attempts by that
  residue gives the blocks that any number of steps takes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from rollout_sched.simulators.instance.attempt import DECODING, SimAttempt


class DecodeBatch:
    """All attempts that gain a token per step. `step` is always the number of steps made."""

    __slots__ = ("_ends", "_needs", "_shifts", "_size", "count")

    def __init__(self, block_size: int) -> None:
        self.count = 0
        self._size = block_size
        self._shifts = 0
        self._needs = [0] * block_size
        # (-end, -order, attempt), the next to end last, so that removing it is cheap.
        self._ends: list[tuple[int, int, SimAttempt]] = []

    def join(self, attempt: SimAttempt, step: int) -> None:
        """It gains its first token in the step after boundary `step`."""
        attempt.state = DECODING
        attempt.shift = shift = attempt.tokens - step
        self.count += 1
        self._shifts += shift
        self._needs[(1 - shift) % self._size] += 1
        insort(self._ends, (shift - attempt.goal, -attempt.order, attempt))

    def leave(self, attempt: SimAttempt, step: int) -> None:
        shift = attempt.shift
        attempt.tokens = shift + step
        self.count -= 1
        self._shifts -= shift
        self._needs[(1 - shift) % self._size] -= 1

    def delay(self, attempt: SimAttempt, step: int) -> None:
        """It was left out of the step that ended with boundary `step`, so everything happens one
        step later for it."""
        self.leave(attempt, step - 1)
        self.join(attempt, step)

    def context(self, step: int) -> int:
        """Sum of the contexts that the step after this boundary reads."""
        return self._shifts + self.count * step

    def next_end(self) -> int:
        """The step in which the next attempt ends; there must be one."""
        ends = self._ends
        while True:
            end, order, attempt = ends[-1]
            if attempt.order == -order and attempt.shift - attempt.goal == end:
                return -end
            ends.pop()  # it has left or was delayed

    def ending(self, step: int) -> list[SimAttempt]:
        """The attempts that end in this step, in running order. The caller removes them."""
        ends, found = self._ends, []
        while ends and ends[-1][0] >= -step:
            end, order, attempt = ends.pop()
            if attempt.order == -order and attempt.shift - attempt.goal == end:
                found.append(attempt)
        return found

    def needs_at(self, step: int) -> int:
        """Blocks that the step after this boundary takes."""
        return self._needs[step % self._size]

    def needing(self, step: int, running: Iterable[SimAttempt]) -> list[SimAttempt]:
        """The running attempts that take blocks in this step. Used only if there are too few."""
        size = self._size
        decoding = (a for a in running if a.state == DECODING)
        return [a for a in decoding if (a.shift + step - 1) % size == 0]

    def demand(self, step: int, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        size, needs = self._size, self._needs
        cycles, rest = divmod(steps, size)
        start = step % size
        blocks = cycles * self.count + sum(needs[start : start + rest])
        if start + rest > size:
            blocks += sum(needs[: start + rest - size])
        return blocks

    def steps_that_fit(self, step: int, steps: int, free: int) -> int:
        """The largest m <= steps such that m steps need at most `free` blocks."""
        size, count = self._size, self.count
        if (steps // size + 1) * count <= free:
            return steps  # the common case, without using the residues
        cycles, free = divmod(free, count)
        for offset in range(size):
            free -= self._needs[(step + offset) % size]
            if free < 0:
                return min(steps, cycles * size + offset)
        raise AssertionError("a full cycle needs as many blocks as there are attempts")

    def check_invariants(self, attempts: list[SimAttempt]) -> None:
        """Compare with the attempts that should be here. Raises AssertionError."""
        assert self.count == len(attempts), "decoding attempts are miscounted"
        assert self._shifts == sum(a.shift for a in attempts), "contexts are summed up wrongly"
        for residue, count in enumerate(self._needs):
            members = [a for a in attempts if (1 - a.shift) % self._size == residue]
            assert count == len(members), f"residue class {residue} is miscounted"
        ends = {(end, a) for end, order, a in self._ends if a.order == -order}
        missing = {(a.shift - a.goal, a) for a in attempts} - ends
        assert not missing, "an end is missing"
