"""The model of a recorded workload: turns, samples, groups; lengths and times, never text.

A trace has the recorded length of every sample, so that a replay can compute how long each schedule
would have taken. The records are small (no garbage-collector header, shared strings and labels)
because a replay of a long run holds a million of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.process import install_extra

Finish = Literal["stop", "length", "cut", "unknown"]

# No context is this long: such a number is a time stamp or an id in the wrong column.
MAX_TOKENS = 100_000_000

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

#: No workload lasts as many seconds: such a time is a Unix time, of 2001 or later.
UNIX_S = 1e9

#: A time between two events. An arrival may be a Unix time, which the reader counts from the first.
Duration = Annotated[float, msgspec.Meta(ge=0, lt=UNIX_S)]

#: The label of samples whose tokens the recorder did not count. The second constant is its value if
#: a tokenizer has counted them; any other value is an estimate.
COUNTED_BY = "tokens_counted_by"
TOKENIZER = "tokenizer"

#: The label of samples whose group was judged: "kept", or "filtered" and not trained.
VERDICT = "verdict"

_NO_LABELS: dict[str, str] = {}


def _no_labels() -> Mapping[str, str]:
    """The empty mapping that all unlabelled samples share."""
    return _NO_LABELS


def brief(text: str) -> str:
    """The text, or its beginning if it is too long for a message."""
    return text if len(text) <= 60 else text[:57] + "..."


class TraceError(CallerError):
    """A trace that cannot be used: the place, what was found, and the remedy.

    The message reads `<where>, line <n>, field '<field>': <found>; <remedy>`.
    """

    def __init__(
        self, where: str, found: str, remedy: str, *, line: int | None = None, field: str = ""
    ) -> None:
        place = where
        if line is not None:
            place += f", line {line}"
        if field:
            place += f", field '{field}'"
        super().__init__(f"{place}: {found}; {remedy}")
        self.where = where
        self.line = line
        self.field = field
        self.found = found
        self.remedy = remedy


class SamplePlace(NamedTuple):
    """The place of a sample: the file, and the line from 1, or the row if there are no lines."""

    where: str
    line: int | None


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """One output of the model and the observation after it.

    output_tokens: tokens generated, at least 1.
    observation_tokens: tokens the tool or user added after the output.
    tool_s: seconds between the output and the next turn.
    The last two are 0 on a sample's last turn, because nothing follows it.
    """

    output_tokens: Length
    observation_tokens: Count = 0
    tool_s: Duration = 0.0


class SampleRecord(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One recorded sample of a group.

    group: the group's name; sample: this sample's index in it, from 0.
    prompt_tokens: length of the first prompt.
    turns: one for a plain completion, several for a trajectory; never empty.
    arrival_s: seconds after the start of the trace, where the source recorded arrivals.
    finish: "length" means ended by a token cap; "cut", ended before its end by a policy, an abort
    or the end of the recording. Both are censored: the sample is at least this long.
    version: policy version that generated it, where recorded.
    labels: the source's further columns (model, prompt id, score), shared between samples.
    """

    group: str
    sample: Count
    prompt_tokens: Length
    turns: Annotated[tuple[Turn, ...], msgspec.Meta(min_length=1)]
    arrival_s: Seconds = 0.0
    finish: Finish = "stop"
    version: Count | None = None
    labels: Mapping[str, str] = msgspec.field(default_factory=_no_labels)

    @property
    def response_tokens(self) -> int:
        """Tokens generated, over all turns."""
        turns = self.turns
        if len(turns) == 1:
            return turns[0].output_tokens
        return sum(turn.output_tokens for turn in turns)

    @property
    def tool_s(self) -> float:
        """Seconds spent between turns."""
        return sum(turn.tool_s for turn in self.turns)

    @property
    def given_tokens(self) -> int:
        """Tokens given to the model: prompt and observations."""
        return self.prompt_tokens + sum([turn.observation_tokens for turn in self.turns])

    def cut_at(self, response_tokens: int) -> SampleRecord:
        """The sample under a cap on its response, at least 1 token."""
        if self.response_tokens <= response_tokens:
            return self
        kept: list[Turn] = []
        left = response_tokens
        for turn in self.turns:
            if turn.output_tokens >= left:
                break
            kept.append(turn)
            left -= turn.output_tokens
        return msgspec.structs.replace(self, turns=(*kept, Turn(left)), finish="length")


class Trace(msgspec.Struct, frozen=True):
    """A named workload: samples by group, groups in order of first appearance.

    groups: group name -> its samples ordered by index; never an empty list.
    about, source, license: one line each, for the credits.
    max_response_tokens: the cap the recording ran under, where declared.
    prompts_per_step, samples_per_prompt: of the recorded trainer, where declared. Samples of a
    group beyond those are further ones of its prompt.
    left_out: requests of the source that were left out because they have no tokens.
    """

    name: str
    groups: dict[str, list[SampleRecord]]
    about: str = ""
    source: str = ""
    license: str = ""
    max_response_tokens: int | None = None
    prompts_per_step: int | None = None
    samples_per_prompt: int | None = None
    left_out: int = 0

    def samples(self) -> Iterator[SampleRecord]:
        """Every sample, group by group."""
        for members in self.groups.values():
            yield from members

    @property
    def sample_count(self) -> int:
        return sum(len(members) for members in self.groups.values())

    @property
    def estimated_by(self) -> str:
        """How tokens were estimated if the source has no counts, as "characters / 3.3"; "" if all
        were counted."""
        counted = (sample.labels.get(COUNTED_BY, TOKENIZER) for sample in self.samples())
        return next((how for how in counted if how != TOKENIZER), "")

    @property
    def group_size(self) -> int:
        """The declared number of samples of a group, or the most common; the larger on a tie."""
        if self.samples_per_prompt is not None:
            return self.samples_per_prompt
        sizes = Counter(len(members) for members in self.groups.values())
        return max(sizes, key=lambda size: (sizes[size], size), default=0)

    @property
    def cap(self) -> int:
        """The declared longest response, or the longest seen, in tokens."""
        if self.max_response_tokens is not None:
            return self.max_response_tokens
        return max((sample.response_tokens for sample in self.samples()), default=0)

    def head(self, groups: int) -> Trace:
        """The trace with only its first `groups` groups."""
        return msgspec.structs.replace(self, groups=dict(islice(self.groups.items(), groups)))


class Gatherer:
    """Collects samples in any order into the shape of a trace.

    Equal group names and equal label mappings are stored once. left_out counts the requests that
    have no tokens; the caller leaves them out.
    """

    def __init__(self, where: str) -> None:
        self.left_out = 0
        self._where = where
        self._members: dict[str, dict[int, SampleRecord]] = {}
        self._names: dict[str, str] = {}
        self._labels: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {(): _NO_LABELS}

    def add(self, sample: SampleRecord, place: SamplePlace | None = None) -> None:
        """Add one sample; raises TraceError if its (group, index) exists already."""
        share = msgspec.structs.force_setattr
        name = self._names.setdefault(sample.group, sample.group)
        share(sample, "group", name)
        if sample.labels is not _NO_LABELS:
            key = tuple(sample.labels.items())
            share(sample, "labels", self._labels.setdefault(key, sample.labels))
        members = self._members.setdefault(name, {})
        if sample.sample in members:
            raise TraceError(
                self._where if place is None else place.where,
                f"sample {sample.sample} of group {brief(repr(name))} appears twice",
                "give every sample of a group its own index",
                line=None if place is None else place.line,
                field="sample",
            )
        members[sample.sample] = sample

    def groups(self) -> dict[str, list[SampleRecord]]:
        """Samples by group, ordered by index; TraceError if there are none."""
        if not self._members:
            found = "no samples"
            if self.left_out:
                found += f", only requests without tokens ({self.left_out})"
            raise TraceError(self._where, found, "record or convert the trace again")
        return {name: [of[i] for i in sorted(of)] for name, of in self._members.items()}


def gather(
    samples: Iterable[SampleRecord], where: str = "samples"
) -> dict[str, list[SampleRecord]]:
    """Samples by group, as a Trace holds them. TraceError on a duplicate or on none."""
    gatherer = Gatherer(where)
    for sample in samples:
        gatherer.add(sample)
    return gatherer.groups()


# ------------------------------------------------------------------------------------------
# Resampled prompts.


def resampled(trace: Trace, seed: int) -> Trace:
    """As many prompts as the trace has, drawn from it with replacement (Efron's bootstrap).

    A prompt that is drawn twice becomes two prompts of the same lengths with different names. If
    arrivals are recorded, each prompt keeps its own, and they stay in order.
    """
    names = list(trace.groups)
    drawn = random.Random(f"resampled/{seed}").choices(names, k=len(names))
    drawn.sort(key=lambda name: trace.groups[name][0].arrival_s)
    groups = {
        f"{number}.{name}": [
            msgspec.structs.replace(sample, group=f"{number}.{name}")
            for sample in trace.groups[name]
        ]
        for number, name in enumerate(drawn)
    }
    return msgspec.structs.replace(trace, groups=groups, max_response_tokens=trace.cap)


# ------------------------------------------------------------------------------------------
# Estimate the tokens of sources without token counts, from texts or seconds of generation.

#: Thinking text of open models runs at 2.8-3.7 characters per token.
CHARS_PER_TOKEN = 3.3

#: For one request in a busy batch: a 32B model on two H100 generates 57 at 32 sequences
#: (simulators/instance/README.md), and fewer at more.
TOKENS_PER_S = 40.0


@dataclass(frozen=True)
class Counting:
    """How to count the tokens of a text: with a tokenizer, or by its characters.

    tokenizer: text -> number of tokens; None counts characters.
    chars_per_token: characters in one token, used without a tokenizer.
    tokens_per_s: generated per second, for sources that have only times.
    """

    tokenizer: Callable[[str], int] | None = None
    chars_per_token: float = CHARS_PER_TOKEN
    tokens_per_s: float = TOKENS_PER_S

    def __call__(self, text: str) -> int:
        """Tokens of the text, at least 1: even an empty output ended with a stop token."""
        if self.tokenizer is not None:
            return max(1, self.tokenizer(text))
        return max(1, math.ceil(len(text) / self.chars_per_token))

    def of_seconds(self, seconds: float) -> int:
        """Tokens generated in this time, at least 1."""
        return max(1, round(seconds * self.tokens_per_s))

    @property
    def label(self) -> str:
        if self.tokenizer is not None:
            return TOKENIZER
        return f"characters / {self.chars_per_token:g}"

    @property
    def label_of_seconds(self) -> str:
        return f"seconds * {self.tokens_per_s:g}"


def with_tokenizer(path: Path, counting: Counting | None = None) -> Counting:
    """Count by a tokenizer.json file, or the one in a model's folder. Needs the extra `tokenizer`.

    Raises TraceError if there is none, or it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TraceError(
            str(path), "no tokenizer.json", "name that of the model, or the folder that has it"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TraceError(
            str(path), "tokenizers is not installed", install_extra("tokenizer")
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise TraceError(
            str(file), f"no tokenizer ({error})", "name a tokenizer.json of the tokenizers library"
        ) from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    base = counting or Counting()
    return Counting(count, base.chars_per_token, base.tokens_per_s)
