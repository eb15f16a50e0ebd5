"""How long another sample of a prompt may be: a distribution fitted from recorded lengths.

    log length = effect of the prompt + residual

The effects are normal around 0; their variance against that of the residuals is the correlation of
siblings. The residuals are pooled over all prompts as an empirical distribution, so a heavy tail is
shared: a runaway that any prompt has shown can happen to any prompt, with the pooled chance. What
the samples of a prompt tell of its effect is its posterior distribution: few samples move it little
from 0 (empirical Bayes), and a runaway among them counts for little, because the tail explains it.

Both distributions are fitted by expectation-maximisation on a grid of log lengths. A sample with
finish "cut" or "length" is right-censored, at least this long, so each step takes the Kaplan-Meier
estimate of the residuals, with a tail where it ends (`survival`). That the shortest n of n + k
samples are seen and k are cut at the length of the n-th needs nothing more: given the effect, its
likelihood is that of k samples which are at least so long.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.simulators.traces.model import MAX_TOKENS, SampleRecord, Trace, Turn
from rollout_sched.simulators.traces.survival import distribution

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Bins between the shortest and the longest recorded length, and the least width of one.
_BINS = 128
_LEAST_WIDTH = 1e-3

#: Prompts from which the distributions are fitted, evenly taken from all; more change little.
_MOST_PROMPTS = 512

_STEPS = 25

#: Correlation of siblings (on log lengths) assumed where no prompt has two samples.
_USUAL_CORRELATION = 0.75

#: The least variance of effects with which the fit begins, as a share: from 0 it would never grow.
_LEAST_SHARE = 0.02


class LengthModel:
    """The distribution of response lengths of each prompt of a trace. Fitted when first used."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._posteriors: dict[str, list[float]] = {}

    @cached_property
    def _fit(self) -> _Fit:
        return _Fit(self._trace)

    def draw(
        self, members: Sequence[SampleRecord], group: str, index: int, seed: int, times: int = 0
    ) -> SampleRecord:
        """Another sample of the prompt whose recorded samples are `members`; `times`: how often it
        has started before.

        Its turns are those of one of them, scaled to the length that was drawn. The same arguments
        give the same sample on every machine and in every order of calls. The effect of the prompt
        is drawn once per seed.
        """
        rng = _generator(f"{seed}/{index}/{times}/{group}")
        tokens = self._fit.length(self._effect(members, seed), rng.random())
        drawn = _scaled(rng.choice(members), tokens)
        return msgspec.structs.replace(drawn, group=group, sample=index)

    def completed(self, trace: Trace, seed: int) -> Trace:
        """The trace with its cut samples completed: each goes on in its last turn up to a length
        drawn from the distribution above what was recorded, at most to the cap."""
        if not has_cut(trace):
            return trace
        cap = trace.cap
        groups = {
            name: [self._complete(sample, members, cap, seed) for sample in members]
            for name, members in trace.groups.items()
        }
        return msgspec.structs.replace(trace, groups=groups, max_response_tokens=cap)

    def _complete(
        self, sample: SampleRecord, members: Sequence[SampleRecord], cap: int, seed: int
    ) -> SampleRecord:
        if sample.finish != "cut":
            return sample
        rng = _generator(f"{seed}/{sample.sample}/{sample.group}/cut")
        seen, effect = sample.response_tokens, self._effect(members, seed)
        tokens = self._fit.length(effect, rng.random(), above=seen)
        *before, last = sample.turns
        longer = msgspec.structs.replace(last, output_tokens=last.output_tokens + tokens - seen)
        whole = msgspec.structs.replace(sample, turns=(*before, longer), finish="stop")
        return whole.cut_at(max(seen, cap))

    def _effect(self, members: Sequence[SampleRecord], seed: int) -> int:
        prompt = members[0].group
        posterior = self._posteriors.get(prompt)
        if posterior is None:
            posterior = self._posteriors[prompt] = self._fit.effect(members)
        return bisect_right(posterior, _generator(f"{seed}/{prompt}").random())


def has_cut(trace: Trace) -> bool:
    return any(sample.finish == "cut" for sample in trace.samples())


def guessed_share(recorded: Trace, completed: Trace) -> float:
    """Of the response tokens that the completed trace asks for, the share that was not recorded."""
    if completed is recorded:
        return 0.0
    seen, all_ = (
        sum(
            sample.response_tokens
            for members in trace.groups.values()
            for sample in members[: recorded.samples_per_prompt]
        )
        for trace in (recorded, completed)
    )
    return 1 - seen / all_


class _Fit:
    """The pooled distributions, on a grid of log lengths.

    Bin b of the lengths is at origin + width * b. An effect is a number of bins from -reach to
    reach, stored from 0, and a residual is the length without it: length b and effect e have
    residual b - e + 2 * reach. A sample's place is its bin, and _BINS + 1 more if it is censored.
    There is room for residuals above those of any sample: as the cap is, for every effect.
    """

    def __init__(self, trace: Trace) -> None:
        prompts = list(trace.groups.values())
        prompts = prompts[:: -(-len(prompts) // _MOST_PROMPTS)]
        samples = [sample for members in prompts for sample in members]
        sizes = np.array([len(members) for members in prompts])
        prompt = np.repeat(np.arange(len(prompts)), sizes)
        logs = np.log([sample.response_tokens for sample in samples])
        self._origin = float(logs.min())
        self._width = max(float(np.ptp(logs)) / _BINS, _LEAST_WIDTH)
        share = intraclass_correlation(logs, prompt)
        share = max(_USUAL_CORRELATION if share is None else share, _LEAST_SHARE)
        variance = share * (float(logs.std()) / self._width) ** 2  # in bins
        self._reach = min(_BINS, math.ceil(3.5 * math.sqrt(variance)))
        self._effects = np.arange(-self._reach, self._reach + 1)
        self._pairs = np.arange(_BINS + 1)[:, None] - self._effects + self._reach
        within = _spread_of_middle(logs - (np.bincount(prompt, logs) / sizes)[prompt])
        self._kernel = _kernel(max(0.5, within / self._width * len(logs) ** -0.2))
        places = self._places(samples)
        room = math.ceil((math.log(trace.cap) - self._origin) / self._width) - _BINS
        size = int(self._pairs.max()) + 1 + max(_BINS // 2, room + self._reach)
        self._density = np.bincount(places % (_BINS + 1) + self._reach, minlength=size) / len(
            places
        )
        for _ in range(_STEPS):
            variance = self._improve(places, prompt, variance)
        self._table, self._prior = self._log_likelihood(), self._log_prior(variance)
        self._upto = [0.0, *np.cumsum(self._density).tolist()]

    def length(self, effect: int, chance: float, above: int = 0) -> int:
        """Tokens at the quantile `chance` of the residuals; with `above`, of those that make the
        sample longer."""
        upto, offset, below = self._upto, effect - 2 * self._reach, 0.0
        if above:
            at = (math.log(above) - self._origin) / self._width - offset + 0.5
            residual = min(max(int(at), 0), len(upto) - 2)
            below = upto[residual] + (at - residual) * (upto[residual + 1] - upto[residual])
            below = min(max(below, 0.0), upto[-1])
        place = below + chance * (upto[-1] - below)
        residual = min(bisect_right(upto, place), len(upto) - 1) - 1
        share = upto[residual + 1] - upto[residual]
        within = (place - upto[residual]) / share if share else 0.5
        log = self._origin + self._width * (residual + within - 0.5 + offset)
        return min(max(round(math.exp(min(log, 20.0))), above, 1), MAX_TOKENS)

    def effect(self, members: Sequence[SampleRecord]) -> list[float]:
        """The posterior distribution of the prompt's effect, cumulative."""
        logs = self._table[self._places(members)].sum(axis=0) + self._prior
        cumulative = np.cumsum(np.exp(logs - logs.max()))
        shares: list[float] = (cumulative / cumulative[-1]).tolist()
        return shares

    def _bin(self, tokens: int) -> int:
        return round((math.log(tokens) - self._origin) / self._width)

    def _places(self, samples: Sequence[SampleRecord]) -> Ints:
        censored = [sample.finish in ("cut", "length") for sample in samples]
        bins = [min(max(self._bin(sample.response_tokens), 0), _BINS) for sample in samples]
        places: Ints = np.array(bins) + (_BINS + 1) * np.array(censored)
        return places

    def _log_prior(self, variance: float) -> Floats:
        return -(self._effects**2) / (2 * max(variance, 1e-6))

    def _log_likelihood(self) -> Floats:
        """By place and effect: of a sample that ended there, or that was at least so long."""
        # The uniform part keeps a gap between two long residuals from deciding on an effect.
        density = np.convolve(self._density, self._kernel, "same")
        density = 0.99 * density + 0.01 / len(density)
        above = np.cumsum(density[::-1])[::-1] - density / 2
        logs: Floats = np.log(np.concatenate([density[self._pairs], above[self._pairs]]))
        return logs

    def _improve(self, places: Ints, prompt: Ints, variance: float) -> float:
        """A step of expectation-maximisation; returns the next variance of the effects."""
        # Sums by rows: a product of matrices would start threads that wait for each other.
        first = np.flatnonzero(np.diff(prompt, prepend=-1))
        logs = np.add.reduceat(self._log_likelihood()[places], first) + self._log_prior(variance)
        posterior: Floats = np.exp(logs - logs.max(axis=1, keepdims=True))
        posterior /= posterior.sum(axis=1, keepdims=True)
        order = np.argsort(places, kind="stable")
        first = np.flatnonzero(np.diff(places[order], prepend=-1))
        weights = np.zeros((2 * (_BINS + 1), len(self._effects)))
        weights[places[order][first]] = np.add.reduceat(posterior[prompt[order]], first)
        size, pairs = len(self._density), self._pairs.ravel()
        ended, censored = (
            np.bincount(pairs, of.ravel(), size).astype(np.float64)
            for of in (weights[: _BINS + 1], weights[_BINS + 1 :])
        )
        self._density = distribution(ended, censored)
        return float((posterior * self._effects**2).sum(axis=1).mean())


def _kernel(spread: float) -> Floats:
    """A normal kernel of this standard deviation, in bins."""
    reach = math.ceil(3 * spread)
    weights: Floats = np.exp(-0.5 * (np.arange(-reach, reach + 1) / spread) ** 2)
    weights /= weights.sum()
    return weights


def _spread_of_middle(values: Floats) -> float:
    """The standard deviation, if they were normal, by their middle two thirds."""
    low, high = np.quantile(values, [0.16, 0.84]).tolist()
    return float(high - low) / 2


def _generator(key: str) -> random.Random:
    # The built-in hash differs between processes.
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def _scaled(sample: SampleRecord, tokens: int) -> SampleRecord:
    """The sample with its turns scaled to so many response tokens, at least one each."""
    turns, recorded = sample.turns, sample.response_tokens
    if len(turns) == 1:
        return msgspec.structs.replace(sample, turns=(Turn(tokens),), finish="stop")
    scaled, made, given = [], 0, 0
    for turn in turns:
        made += turn.output_tokens
        upto = max(given + 1, round(tokens * made / recorded))
        scaled.append(msgspec.structs.replace(turn, output_tokens=upto - given))
        given = upto
    return msgspec.structs.replace(sample, turns=tuple(scaled), finish="stop")


def intraclass_correlation(values: Floats, group: Ints) -> float | None:
    """ICC(1) of values by group number: one-way random effects, groups of unequal size.

    (MSB - MSW) / (MSB + (n0 - 1) MSW), with mean squares between and within groups and
    n0 = (N - sum(n_i^2) / N) / (k - 1). None where it is undefined: fewer than two groups, no
    group of two, or no variance at all.
    Source: Donner (1986), the ANOVA estimator.
    """
    sizes = np.bincount(group).astype(np.float64)
    total, groups = float(sizes.sum()), len(sizes)
    if groups < 2 or total == groups:
        return None
    means = np.bincount(group, values) / sizes
    between = float((sizes * (means - values.mean()) ** 2).sum()) / (groups - 1)
    within = float(((values - means[group]) ** 2).sum()) / (total - groups)
    typical_size = (total - float((sizes**2).sum()) / total) / (groups - 1)
    variance = between + (typical_size - 1) * within
    return (between - within) / variance if variance > 0 else None
