"""Chooses the bursts to measure: batch sizes, contexts and prefills that fit on the server."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_SIZE, Count, Serial
from rollout_sched.simulators.instance import (
    CostModel,
    EngineSteps,
    Speculation,
    StepTime,
    acceptance_giving,
)

#: Prompt tokens of a burst that measures decoding only.
SHORT = 32

#: The smallest context and KV cache that can be measured, in tokens.
LEAST_MODEL_LEN = 2 * SHORT

#: Used share of the KV cache and the context window; the rest is for blocks that are not full.
_ROOM = 0.85

#: Most tokens of a burst, whatever room a server says that it has: all its prompts are kept in
#: memory. It has at most MAX_SIZE requests at once, too.
_MOST_TOKENS = 2**24

#: Number of sizes from the smallest to the largest batch, and prefill.
_BATCHES = 5
_PREFILLS = 4

#: Lengths of a burst in waves: from a quarter to seven quarters of their mean, in an order without
#: repetition (multiples of the golden ratio).
_SHORTEST, _SPREAD, _GOLDEN = 0.25, 1.5, 0.6180339887
_WAVES = 3

#: Fewest and most tokens that a decoding burst generates.
_FEWEST_NEW, _MAX_NEW = 16, 128


class Burst(NamedTuple):
    """Requests that are sent at once. `prompt` and `new` are in tokens.

    With several `waves` there are `waves` times as many requests as the server runs at once, and
    their lengths differ, so that they start and end one by one; `new` is then the mean length.
    """

    batch: int
    prompt: int
    new: int
    waves: int = 1

    @property
    def requests(self) -> int:
        return self.batch * self.waves

    @property
    def lengths(self) -> list[int]:
        """Tokens that each request generates."""
        if self.waves == 1:
            return [self.new] * self.batch
        spread = (_SHORTEST + _SPREAD * (number * _GOLDEN % 1) for number in range(self.requests))
        return [max(1, round(self.new * share)) for share in spread]

    @property
    def answered(self) -> int:
        """Tokens of the answers that end together in the last step."""
        return self.batch * self.new if self.waves == 1 else max(self.lengths)

    @property
    def kv_tokens(self) -> int:
        """The largest number of KV tokens of the requests that run at once."""
        return self.batch * (self.prompt + max(self.lengths))


class Room(msgspec.Struct, frozen=True):
    """A server's capacity: sequences at once, tokens of KV cache, tokens of one context."""

    slots: Count
    kv_tokens: Serial
    max_model_len: Count


class Pace(msgspec.Struct, frozen=True):
    """A server's approximate speed: seconds of a decode step, and of each prefill token."""

    step_s: float
    prefill_token_s: float


#: Measured first, to learn a server's pace: a prefill, the same with decode steps, and a longer
#: prefill.
TRIALS = (Burst(1, SHORT, 1), Burst(1, SHORT, 9), Burst(1, 4 * SHORT, 1))


def trials(room: Room) -> tuple[Burst, ...]:
    """The trials that fit. Raises CallerError if the server is too small to measure."""
    if min(room.max_model_len, room.kv_tokens) < LEAST_MODEL_LEN:
        raise CallerError(
            f"the server has {room.max_model_len} tokens of context and {room.kv_tokens} of KV "
            f"cache, but a calibration needs {LEAST_MODEL_LEN} of each: start vLLM with a larger "
            "--max-model-len and enough memory"
        )
    return tuple(burst for burst in TRIALS if _fits(burst, room))


def pace(seconds: dict[Burst, float]) -> Pace:
    """The pace, from the durations of the trials."""
    first, steps, *longer = (seconds[burst] for burst in TRIALS if burst in seconds)
    made = TRIALS[1].new - TRIALS[0].new
    step_s = max(steps - first, 1e-6) / made
    more = TRIALS[2].prompt - TRIALS[0].prompt
    token_s = max(longer[0] - first, 0.0) / more if longer else first / SHORT
    return Pace(step_s, max(token_s, step_s / 1024))


def bursts_of(room: Room, pace: Pace, burst_s: float) -> list[Burst]:
    """Different bursts of about `burst_s` seconds or less each. They change in large steps with the
    pace, so that a second calibration measures the same bursts."""
    kv_tokens = min(room.kv_tokens, _MOST_TOKENS)
    room = Room(min(room.slots, MAX_SIZE), kv_tokens, min(room.max_model_len, kv_tokens))
    steps = _power_of_two(burst_s / pace.step_s)
    new = min(max(steps, _FEWEST_NEW), _MAX_NEW, room.max_model_len - SHORT)
    prefill = _power_of_two(burst_s / pace.prefill_token_s)
    found: dict[Burst, None] = {}
    for batch in _between(1, room.slots, _BATCHES):
        shorter = max(_FEWEST_NEW, new // 4)
        longest = min(prefill, int(_ROOM * room.kv_tokens)) // batch - new
        longest = min(longest, int(_ROOM * room.max_model_len) - new)
        found[Burst(batch, SHORT, new)] = None
        found[Burst(batch, SHORT, 1)] = None
        for context in _between(SHORT, longest, 3)[1:]:
            found[Burst(batch, context, new)] = None
        if batch > 1:
            found[Burst(batch, SHORT, shorter)] = None
    found[Burst(room.slots, SHORT, 2 * new)] = None  # its answers take longer to write
    longest = min(prefill, int(_ROOM * min(room.kv_tokens, room.max_model_len)))
    for prompt in _between(2 * SHORT, longest, _PREFILLS):
        found[Burst(1, prompt, 1)] = None
    longer = min(8 * SHORT, prefill // room.slots)
    for prompt in (SHORT, max(SHORT, longer)):
        for mean in (_FEWEST_NEW, max(_FEWEST_NEW, new // 2)):
            found[Burst(room.slots, prompt, mean, _WAVES)] = None
    return [burst for burst in found if _fits(burst, room)]


def _fits(burst: Burst, room: Room) -> bool:
    return (
        burst.batch <= room.slots
        and burst.prompt + max(burst.lengths) <= room.max_model_len
        and burst.kv_tokens <= room.kv_tokens
    )


def _power_of_two(number: float) -> int:
    """The largest power of two that is not larger than `number`; at least 1."""
    return 1 << max(0, int(math.log2(max(number, 1.0))))


def _between(least: int, most: int, count: int) -> list[int]:
    """Whole numbers in about equal ratios from `least` to `most`; only `least` if it is not smaller
    than `most`."""
    if most <= least:
        return [least]
    ratio = (most / least) ** (1 / (count - 1))
    found = [round(least * ratio**place) for place in range(count - 1)] + [most]
    return list(_without_repeats(found))


def _without_repeats(numbers: list[int]) -> Iterator[int]:
    yield numbers[0]
    yield from (after for before, after in pairwise(numbers) if after != before)


# ------------------------------------------------------------------------------------------
# The engine steps of a burst, by the rules of `simulators.instance` for requests that arrive at
# once and have KV memory enough.


@dataclass
class _Running:
    """A request with `computed` tokens in the KV cache; it ends when these are `last`."""

    last: int
    computed: int = 0


def steps_of(burst: Burst, slots: int, max_num_batched_tokens: int) -> list[EngineSteps]:
    """The steps of requests that arrive at once at an instance that runs `slots` of them.
    Consecutive steps with equal numbers of sequences and prefill tokens become one entry."""
    each = _each_step(burst, slots, max(max_num_batched_tokens, slots))
    runs = (list(run) for _, run in groupby(each, key=lambda step: step[1:3]))
    return [
        EngineSteps(
            len(run),
            run[0].sequences,
            run[0].prefill_tokens,
            sum(step.context for step in run),
            sum(step.attention for step in run),
            sum(step.requests for step in run),
        )
        for run in runs
    ]


def _each_step(burst: Burst, slots: int, budget: int) -> Iterator[EngineSteps]:
    """A step has a token of each request that decodes. What is left of its `budget` of tokens goes
    to prompts, one after the other; the rest of a prompt is computed in the next step."""
    waiting = deque(_Running(burst.prompt + new - 1) for new in burst.lengths)
    running: list[_Running] = []
    while waiting or running:
        decoding = [one for one in running if one.computed >= burst.prompt]
        prefilling = [one for one in running if one.computed < burst.prompt]
        context = sum(one.computed + 1 for one in decoding)
        for one in decoding:
            one.computed += 1
        left, prefill, attention, admitted = budget - len(decoding), 0, 0.0, 0
        while left and (prefilling or (waiting and len(running) < slots)):
            if not prefilling:
                prefilling.append(waiting.popleft())
                running += prefilling
                admitted += 1
            one = prefilling.pop()
            tokens = min(left, burst.prompt - one.computed)
            attention += tokens * (one.computed + tokens / 2)
            one.computed += tokens
            prefill += tokens
            left -= tokens
        running = [one for one in running if one.computed < one.last]
        yield EngineSteps(1, len(decoding), prefill, context, attention, admitted)


# ------------------------------------------------------------------------------------------
# The duration of a burst, and the part of it in which its answers were written.


class DraftCounts(NamedTuple):
    """How often an engine drafted for a sequence, the drafted tokens, and the accepted ones."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Of each draft, if all had the same number."""
        return round(self.drafted / max(1, self.drafts))

    @property
    def acceptance(self) -> float:
        """Of a drafted token, if those before it were accepted; each position has the same."""
        if not self.accepted:
            return 0.0
        return min(1.0, acceptance_giving(1 + self.accepted / self.drafts, self.tokens))


class BurstTime(NamedTuple):
    """Seconds from the first request to the first, to the last, and on average to an answer; what
    the engine drafted meanwhile."""

    first_s: float
    last_s: float
    mean_s: float = 0.0
    drafts: DraftCounts = DraftCounts()


def writing_s(times: Mapping[Burst, Iterable[BurstTime]]) -> float:
    """Seconds of writing per answer token, outside the engine. Answers of the same step are written
    one after the other, so the delay from the first answer to the last grows with their length; the
    growth gives the time per token. 0 unless two lengths were measured.

    It compares the two longest lengths of the largest batch: with short answers the delay comes
    from the arrival of the requests one after the other. It uses the shortest prompts, so that one
    step ends all requests.
    """
    alike = [burst for burst in times if burst.waves == 1 and burst.prompt == SHORT]
    most = max((burst.batch for burst in alike), default=1)
    longest = sorted(burst for burst in alike if burst.batch == most)[-2:]
    if most == 1 or len(longest) < 2:
        return 0.0
    shorter, longer = longest
    later_s = [
        median(time.last_s - time.first_s for time in times[burst]) / (most - 1)
        for burst in (shorter, longer)
    ]
    return max((later_s[1] - later_s[0]) / (longer.new - shorter.new), 0.0)


# ------------------------------------------------------------------------------------------
# The drafts of an engine whose other costs are known.
#
# Only the mean of accepted drafts is modelled (simulators/instance/step_time), and sequences of a
# burst end apart by chance. So what counts is the mean time of an answer after its first token, and
# how many steps a sequence took on average, which the engine's counters say.


class DraftFit(msgspec.Struct, frozen=True):
    """errors: predicted / measured - 1 of each burst."""

    speculation: Speculation
    counts: DraftCounts
    errors: list[float]


class _Drafted(NamedTuple):
    """The mean `seconds` of a burst's answers after their first tokens, in `steps` with `tokens`
    drafts."""

    burst: Burst
    tokens: int
    steps: float
    seconds: float

    def predicted(self, cost: CostModel, acceptance: float, share: float) -> float:
        drafts = Speculation(self.tokens, acceptance, schedule="always", draft_share=share)
        time, made = StepTime(cost, drafts), self.burst.new - 1
        tokens_per_step = time.drafts(self.burst.batch)[2]
        seconds = time.jump(made, self.burst.batch, self.burst.batch * (self.burst.prompt + 1))
        return seconds * self.steps * tokens_per_step / made


def fit_drafts(times: Mapping[Burst, Sequence[BurstTime]], cost: CostModel) -> DraftFit:
    """The drafts of the engine that took these times, if `cost` is that of the same without drafts.
    A number of drafts counts for all smaller batches down to the next that was measured. Raises
    CallerError if there were none."""
    counts = {
        burst: DraftCounts(*map(sum, zip(*(time.drafts for time in each), strict=True)))
        for burst, each in times.items()
        if burst.waves == 1 and burst.new > 1
    }
    total = DraftCounts(*map(sum, zip(*counts.values(), strict=True)))
    bursts = list(_drafted(times, counts))
    if not bursts:
        raise CallerError("the server drafted no tokens: calibrate it without --base")
    weighted = sum([each.acceptance * each.drafts for each in counts.values()])
    acceptance = weighted / total.drafts
    share = _draft_share(bursts, cost, acceptance)
    rows = _schedule({burst.batch: each.tokens for burst, each in sorted(counts.items())})
    tokens = max(row[2] for row in rows)
    drafts = Speculation(
        tokens,
        acceptance,
        schedule="always" if len(rows) == 1 else rows,
        draft_share=share,
    )
    errors = [one.predicted(cost, acceptance, share) / one.seconds - 1 for one in bursts]
    return DraftFit(drafts, total, errors)


def _drafted(
    times: Mapping[Burst, Sequence[BurstTime]], counts: Mapping[Burst, DraftCounts]
) -> Iterator[_Drafted]:
    means = {burst: median(time.mean_s for time in each) for burst, each in times.items()}
    for burst, each in counts.items():
        alone = means.get(burst._replace(new=1))
        if alone is not None and each.drafts and means[burst] > alone:
            steps = each.drafts / (burst.batch * len(times[burst]))
            yield _Drafted(burst, each.tokens, steps, means[burst] - alone)


def _draft_share(bursts: Sequence[_Drafted], cost: CostModel, acceptance: float) -> float:
    """By least squares of the relative error; times are linear in it. 0 if no model drafts."""
    least = 1e-9  # 0 would leave out the launch of a model
    across = along = 0.0
    for one in bursts:
        start = one.predicted(cost, acceptance, least) / one.seconds
        slope = one.predicted(cost, acceptance, 1.0) / one.seconds - start
        across += (1 - start) * slope
        along += slope * slope
    return max(0.0, across / along) if along else 0.0


def _schedule(tokens: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """As rows of (first, last, drafts), from the drafts by batch in ascending order."""
    rows: list[tuple[int, int, int]] = []
    for batch, drafts in tokens.items():
        first = rows[-1][1] + 1 if rows else 1
        if rows and rows[-1][2] == drafts:
            first = rows.pop()[0]
        rows.append((first, batch, drafts))
    return tuple(rows)
