"""Synthetic workloads, for claims whose lengths are not published and for fleets of any size."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rollout_sched.simulators.traces.model import MAX_TOKENS, SampleRecord, Trace, Turn


def synthetic(
    groups: int,
    samples: int,
    *,
    median: float = 4055.0,
    sigma_between: float = 0.82,
    sigma_within: float = 0.47,
    cap: int = 32_768,
    prompt_median: float = 150.0,
    prompt_sigma: float = 0.6,
    seed: int = 0,
) -> Trace:
    """A single-turn workload: `groups` groups of `samples`, log-normal on two levels.

    log length = log(median) + N(0, sigma_between) per group + N(0, sigma_within) per sample,
    rounded, at least 1 token, cut at `cap` with finish "length". One prompt length per group.
    The mean before the cap is median * exp((sigma_between^2 + sigma_within^2) / 2).
    Default sigmas: pooled over public reasoning data sets (groups of 3 to 8).
    Raises ValueError for an invalid size or sigma.
    """
    _check_sizes(groups=groups, samples=samples, median=median, cap=cap, prompts=prompt_median)
    _check_sigmas(between=sigma_between, within=sigma_within, prompt=prompt_sigma)
    rng = np.random.default_rng(seed)
    prompts = _lengths(prompt_median, rng.normal(0.0, prompt_sigma, groups))
    effects = rng.normal(0.0, sigma_between, groups)[:, None]
    lengths = _lengths(median, effects + rng.normal(0.0, sigma_within, (groups, samples)))
    made = {}
    for number, (prompt, row) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
        name = str(number)
        made[name] = [
            SampleRecord(name, i, prompt, (Turn(n),))
            if n <= cap
            else SampleRecord(name, i, prompt, (Turn(cap),), finish="length")
            for i, n in enumerate(row)
        ]
    about = (
        f"synthetic: {groups} groups of {samples}, median {median:g}, "
        f"sigma {sigma_between:g} between and {sigma_within:g} within groups, seed {seed}"
    )
    return Trace(f"synthetic_{groups}x{samples}", made, about=about, max_response_tokens=cap)


def _lengths(median: float, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    # Above MAX_TOKENS the exact value does not matter, and would overflow the integer.
    lengths = np.clip(np.rint(median * np.exp(np.minimum(logs, 50.0))), 1, MAX_TOKENS)
    return lengths.astype(np.int64)


def _check_sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        if not 1 <= size < math.inf:
            raise ValueError(f"{name} is {size}; expected a number of at least 1")


def _check_sigmas(**sigmas: float) -> None:
    for name, sigma in sigmas.items():
        if not 0 <= sigma < math.inf:
            raise ValueError(f"sigma_{name} is {sigma}; expected a number of at least 0")
