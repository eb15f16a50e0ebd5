"""The cost model: the duration of one engine step.

    step = t0 + G(n) + c_b * B + k * C + a * A + r * R + f * [n > B]
    G(n) = (t_w ** p + (s * n) ** p) ** (1 / p)

with B decode sequences, n tokens in the step (B plus the prefill tokens), C the sum of the
decode contexts, A the attention work of the prefill chunks, sum of q * (prefix + q / 2), and R the
requests admitted in the step, including those preempted earlier. [n > B] is 1 in
a step that prefills anything, else 0.

G joins the two regimes of a matrix multiplication smoothly: reading the weights (t_w, memory
bound) and multiplying (s per token, compute bound). With p = 1.6 it was fitted to the published
kernel tables of Vidur (arXiv 2405.05465) for 38 combinations of GPU, model and tensor
parallelism with a mean error of 3-7 %; a straight line misses the knee between the regimes.
"""

from __future__ import annotations

import math

import msgspec


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one instance type, all in seconds.

    step_s       t0   per step: launching, sampling, the scheduler itself
    weights_s    t_w  reading all weights once
    token_s      s    matrix multiplications of one token
    exponent     p    how sharply the two regimes meet, >= 1
    sequence_s   c_b  per decode sequence
    context_s    k    reading the KV of one context token in a decode
    attention_s  a    one query token attending to one key token in a prefill
    request_s    r    accepting a request and returning its answer, whatever its length: the work of
                      the engine and its front end for it, during which the others wait
    prefill_s    f    a step that prefills, because it cannot use the graph of a decode step

    Raises ValueError if a constant is negative or not finite, or a step could take no time.
    """

    step_s: float
    weights_s: float
    token_s: float
    exponent: float = 1.6
    sequence_s: float = 0.0
    context_s: float = 0.0
    attention_s: float = 0.0
    request_s: float = 0.0
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"cost model: {name} must be finite and >= 0, got {value}")
        if self.exponent < 1:
            raise ValueError(f"cost model: exponent must be >= 1, got {self.exponent}")
        if self.step_s + self.weights_s <= 0:
            raise ValueError("cost model: step_s + weights_s must be > 0, else time cannot advance")
