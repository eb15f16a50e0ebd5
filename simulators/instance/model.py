"""A simulated instance in data: its costs, its settings, its inputs and outcomes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.records import Count, Size

# ------------------------------------------------------------------------------------------
# The cost model: the duration of one engine step.
#
#     step = t0 + G(n) + c_b * B + k * C + a * A + r * R + f * [n > B]
#     G(n) = (w(n) ** p + (s * n) ** p) ** (1 / p),  w(n) = t_w + t_e * (1 - (1 - q) ** n)
#
# with B decode sequences, n tokens in the step (B plus the prefill tokens), C the sum of the
# decode contexts, A the attention work of the prefill chunks, sum of q * (prefix + q / 2), and R
# the requests admitted in the step, including those preempted earlier. [n > B] is 1 in
# a step that prefills anything, else 0.
#
# G joins the two regimes of a matrix multiplication smoothly: reading the weights (t_w, memory
# bound) and multiplying (s per token, compute bound). With p = 1.6 it was fitted to the published
# kernel tables of Vidur (arXiv 2405.05465) for 38 combinations of GPU, model and tensor
# parallelism with a mean error of 3-7 %; a straight line misses the knee between the regimes.
#
# A mixture of experts reads only the experts that its n tokens are routed to. A token takes k of E,
# a share q = k / E, so n tokens leave (1 - q) ** n of them unread if they are routed independently.


#: A constant of the cost model is at most a minute: each is of one step, or of one of its tokens.
MOST = 60.0


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one instance type, all in seconds.

    step_s       t0   per step: launching, sampling, the scheduler itself
    weights_s    t_w  reading once the weights that every step reads
    token_s      s    matrix multiplications of one token
    exponent     p    how sharply the two regimes meet, >= 1
    sequence_s   c_b  per decode sequence
    context_s    k    reading the KV of one context token in a decode
    attention_s  a    one query token attending to one key token in a prefill
    request_s    r    accepting a request and returning its answer, whatever its length: the work of
                      the engine and its front end for it, during which the others wait
    prefill_s    f    a step that prefills, because it cannot use the graph of a decode step
    experts_s    t_e  reading all routed experts once; 0 in a dense model
    expert_share q    share of the routed experts that one token takes, 0 to 1, no time

    Raises ValueError if a constant is negative or over MOST, or a step could take no time.
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
    experts_s: float = 0.0
    expert_share: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= MOST:
                raise ValueError(f"cost model: {name} must be from 0 to {MOST:g}, got {value}")
        if self.exponent < 1:
            raise ValueError(f"cost model: exponent must be >= 1, got {self.exponent}")
        if self.expert_share > 1:
            raise ValueError(f"cost model: expert_share must be <= 1, got {self.expert_share}")
        if self.step_s + self.weights_s <= 0:
            raise ValueError("cost model: step_s + weights_s must be > 0, else time cannot advance")

    def read_s(self, tokens: int) -> float:
        """w: seconds to read the weights that a step of so many tokens needs."""
        return self.weights_s + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)


#: Cost of one draft step as a share of G, by method: a 0.5B model drafts for a 7B, EAGLE adds one
#: layer and a head, n-grams and suffixes run no model.
DRAFT_SHARES = {"draft_model": 0.08, "eagle": 0.05, "ngram": 0.0, "suffix": 0.0}

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: k drafted tokens per sequence, which one step of the model verifies.

    method        draft_model, eagle, ngram or suffix; it only sets the default of draft_share
    tokens        k, or the most of it
    acceptance    probability that a drafted token is accepted if those before it were
    schedule      "always" k; "auto", for each number of decoding sequences the k of 0 to `tokens`
                  that takes the least time per token; or rows of (first, last, k) by that number,
                  as vLLM's num_speculative_tokens_per_batch_size: a gap has the k before it
    context       tokens of context per sequence for which "auto" chooses
    draft_share   one draft step costs this share of G(B), and if it is not 0, 0.3 t0
    kv_share      of the KV blocks, what the drafter takes
    acceptance_lost_per_version  share of the acceptance that each new version of the weights takes
    draft_update_every           versions after which the drafter fits again; 0: never again

    Raises ValueError for an unknown method, or a schedule that vLLM refuses too.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    acceptance: Share
    method: str = "draft_model"
    schedule: str | tuple[tuple[Size, Size, Size], ...] = "auto"
    context: Count = 4096
    draft_share: Annotated[float, msgspec.Meta(ge=0)] | None = None
    kv_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    acceptance_lost_per_version: Share = 0.0
    draft_update_every: Count = 0

    def __post_init__(self) -> None:
        if self.method not in DRAFT_SHARES:
            raise ValueError(f"method {self.method!r}: expected one of {', '.join(DRAFT_SHARES)}")
        if not self._rows and self.schedule not in ("always", "auto"):
            raise ValueError(
                f'schedule {self.schedule!r}: expected "always", "auto", or rows of first and last '
                f"number of sequences and drafts, as [[1, 16, 4], [17, 64, 2]]"
            )
        end = 0
        for first, last, tokens in self._rows:
            row = f"schedule: [{first}, {last}, {tokens}]"
            if not end < first <= last or (not end and first != 1):
                raise ValueError(f"{row}: begin the first row at 1, and each after the last one")
            if not 0 <= tokens <= self.tokens:
                raise ValueError(f"{row}: give 0 to {self.tokens} drafts, or increase tokens")
            end = last

    @property
    def _rows(self) -> tuple[tuple[int, int, int], ...]:
        return () if isinstance(self.schedule, str) else self.schedule

    def choices(self, sequences: int) -> range:
        """The numbers of drafted tokens to choose from, at this number of decoding sequences."""
        if self.schedule == "auto":
            return range(self.tokens + 1)
        drafts = self.tokens
        for first, _, tokens in self._rows:
            if first <= sequences:
                drafts = tokens
        return range(drafts, drafts + 1)

    def acceptance_of(self, version: int, drafter: int = 0) -> float:
        """The acceptance with these weights; the drafter fits version `drafter`, and earlier ones
        too."""
        behind = max(0, version - drafter)
        if self.draft_update_every:
            behind %= self.draft_update_every
        return self.acceptance * (1 - self.acceptance_lost_per_version) ** behind

    @property
    def draft_cost(self) -> float:
        """The cost of a draft step as a share of G."""
        return DRAFT_SHARES[self.method] if self.draft_share is None else self.draft_share

    def least_cost(self, cost: CostModel) -> CostModel:
        """Constants with which no step per token takes longer than with any of the drafts."""
        made = tokens_per_step(self.tokens, self.acceptance)
        less = {
            name: getattr(cost, name) / made
            for name in ("step_s", "weights_s", "experts_s", "sequence_s", "context_s")
        }
        # token_s = 0: G with weights_s / made would be steeper in prefill tokens than the real one.
        return msgspec.structs.replace(cost, token_s=0.0, **less)


def tokens_per_step(drafts: int, acceptance: float) -> float:
    """Expected tokens of a sequence in a step: the accepted drafts, and the one that follows."""
    return sum([acceptance**number for number in range(drafts + 1)])


def acceptance_giving(tokens: float, drafts: int) -> float:
    """The inverse of `tokens_per_step`; above 1 if even all of the drafts give less."""
    low, high = 0.0, max(1.0, tokens)  # with an acceptance of `tokens` a step makes more
    while high - low > 1e-6:
        middle = (low + high) / 2
        if tokens_per_step(drafts, middle) < tokens:
            low = middle
        else:
            high = middle
    return high


class InstanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an instance; names and defaults are those of vLLM.

    kv_blocks    usable blocks: vLLM's num_gpu_blocks minus its null block
    watermark    fraction of the blocks kept free when admitting while others run
    speculation  None: no tokens are drafted

    Raises ValueError for settings that vLLM refuses too.
    """

    cost: CostModel
    kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    prefix_caching: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"instance: {name} must be >= 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"instance: max_num_batched_tokens ({self.max_num_batched_tokens}) must be "
                f">= max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"instance: watermark must be in [0, 1), got {self.watermark}")

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.kv_blocks + 1))


# ------------------------------------------------------------------------------------------
# The inputs and outcomes of a simulated instance.

Reason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]


class SimRequest(msgspec.Struct, gc=False):
    """One attempt as an instance receives it. All lengths in tokens.

    attempt         its unique number
    context_tokens  what must be in the KV cache first: prompt, earlier tokens, observations
    new_tokens      how many it generates before it ends by itself, >= 1
    max_new_tokens  how many it may generate, >= 1
    prompt_stream   names the text of the first shared_tokens tokens (a group's prompt)
    stream          names the text after those: that of one request, growing over its attempts. A
                    request that starts over needs another name, because its text is another.
    known_tokens    leading context tokens that an earlier attempt has computed already; they only
                    separate prefill from re-prefill in the counters
    salt            prefix-cache namespace: no hits across different salts
    priority        lower is more urgent; ignored with fcfs
    """

    attempt: int
    context_tokens: int
    new_tokens: int
    max_new_tokens: int
    prompt_stream: Hashable
    shared_tokens: int
    stream: Hashable
    known_tokens: int = 0
    salt: Hashable = 0
    priority: int = 0


class Ended(msgspec.Struct, gc=False):
    """An attempt has ended.

    tokens         new tokens of this attempt
    spans          (version, tokens) in order; their sum is tokens
    reason         stop: made all its new_tokens; length: stopped earlier by a limit; abort
    at             time in seconds
    cached_tokens  of its context, found in the prefix cache when it was first admitted; 0 without
                   new tokens
    """

    attempt: int
    tokens: int
    spans: tuple[tuple[int, int], ...]
    reason: Reason
    at: float
    cached_tokens: int = 0


class Paused(msgspec.Struct):
    """A pause is complete: nothing happens until resume.

    at  time in seconds
    """

    mode: PauseMode
    at: float


Outcome = Ended | Paused


class SimGauges(msgspec.Struct, frozen=True, gc=False):
    """The gauges that an instance reports, as of the last call of `advance`.

    waiting   queued and preempted attempts. Those that take effect at the next boundary are not
              counted; nor does vLLM count them, and its /metrics freeze during a pause.
    kv_usage  fraction of the KV blocks in use, 0 to 1
    steps     engine steps completed
    drafts    how often tokens were drafted for a sequence; their tokens, and the accepted ones
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_usage: float
    preemptions: int
    prefill_tokens: int
    cached_tokens: int
    reprefilled_tokens: int
    generated_tokens: int
    steps: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
