"""Traffic: conversations of clients, whose requests are direct, with or without batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators import traces
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class TrafficModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients of the gateway. They arrive whether or not others have been answered (open loop).

    A conversation is a sample of a trace: each of its turns is one request, the observation is the
    client's next message, and the tool's seconds are the client's pause before it. All requests of
    a conversation with several turns carry its session.

    rate        conversations that begin per second, at random (Poisson), each with any sample of
                the trace; 0: each sample once, at the arrival time in the trace
    for_s       new conversations begin for this long; with a rate of 0, 0 is the whole trace
    trace       the source of samples: a file or a shipped trace; "" is the replayed trace
    patience_s  a client that has waited this long for a response withdraws and leaves; 0: never
    max_tokens  of one response; 0: the trace's cap
    seed        another seed gives other clients, as does each of a replay's seeds
    """

    rate: Rate = 0.0
    for_s: Seconds = 0.0
    trace: str = ""
    patience_s: Seconds = 0.0
    max_tokens: Count = 0
    seed: int = 0


class Conversation:
    """One client and its progress.

    prompt          names the text of its first `prompt_tokens` tokens
    turn            of the request in flight, or of the next one
    context_tokens  of that request: its prompt, as the scheduler sees it
    known_tokens    how many of these some instance has computed
    stream          names the text after the prompt: the attempt that began it
    """

    __slots__ = (
        "arrival_s",
        "context_tokens",
        "known_tokens",
        "name",
        "prompt",
        "prompt_tokens",
        "sample",
        "stream",
        "turn",
    )

    def __init__(
        self, name: str, arrival_s: float, sample: SampleRecord, prompt_tokens: int
    ) -> None:
        self.name = name
        self.arrival_s = arrival_s
        self.sample = sample
        self.prompt = f"client/{sample.group}"
        self.prompt_tokens = self.context_tokens = prompt_tokens
        self.known_tokens = 0
        self.turn = 0
        self.stream = 0

    @property
    def session(self) -> str:
        return self.name if len(self.sample.turns) > 1 else ""

    @property
    def group(self) -> str:
        """Requests with the same prompt are siblings. After the first turn no other client has the
        same prompt."""
        return f"{self.name}/{self.turn}" if self.turn else self.prompt

    @property
    def present(self) -> SampleRecord:
        """The current turn, as a sample of its own."""
        sample, turn = self.sample, self.sample.turns[self.turn]
        last = self.turn == len(sample.turns) - 1
        return SampleRecord(
            sample.group,
            sample.sample,
            self.context_tokens,
            (Turn(turn.output_tokens),),
            finish=sample.finish if last else "stop",
        )

    def answered(self, response_tokens: int) -> float | None:
        """Advance to the next turn; returns the seconds until it, None if there is none."""
        turn = self.sample.turns[self.turn]
        self.turn += 1
        if self.turn == len(self.sample.turns):
            return None
        self.known_tokens = self.context_tokens + response_tokens
        self.context_tokens = self.known_tokens + turn.observation_tokens
        return turn.tool_s


class Traffic:
    """The conversations of a run, the same for every policy, and the cap of a response."""

    def __init__(self, model: TrafficModel, replayed: Trace, seed: int) -> None:
        trace = traces.read(model.trace) if model.trace else replayed
        self.patience_s = model.patience_s
        self.max_tokens = model.max_tokens or trace.cap
        self._trace = trace
        self._lengths: dict[str, int] = {}
        prompts = {
            name: max(sample.prompt_tokens for sample in members)
            for name, members in trace.groups.items()
        }
        chosen = _drawn(model, trace, seed) if model.rate else _recorded(model, trace)
        self._chosen = [
            (f"session-{number}", at, sample, prompts[sample.group])
            for number, (at, sample) in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self._chosen)

    def conversations(self) -> list[Conversation]:
        """All conversations, none started, in the order of their arrival."""
        return [Conversation(*each) for each in self._chosen]

    @property
    def most_tokens(self) -> int:
        """The most that any request may need: the conversation before it, and its response."""
        return max((self._most(sample, prompt) for _, _, sample, prompt in self._chosen), default=0)

    def length(self, group: str) -> int:
        """Tokens of a response to this prompt; exact if only one client asks it."""
        if not self._lengths:
            self._lengths = self._learn_lengths()
        return self._lengths[group]

    def _most(self, sample: SampleRecord, prompt_tokens: int) -> int:
        said = sum(
            min(turn.output_tokens, self.max_tokens) + turn.observation_tokens
            for turn in sample.turns[:-1]
        )
        return prompt_tokens + said + self.max_tokens

    def _learn_lengths(self) -> dict[str, int]:
        """By group: the mean over the clients that ask the same."""
        made: dict[str, list[int]] = {}
        for conversation in self.conversations():
            for turn in conversation.sample.turns:
                length = min(turn.output_tokens, self.max_tokens)
                made.setdefault(conversation.group, []).append(length)
                conversation.turn += 1
        return {group: round(sum(each) / len(each)) for group, each in made.items()}


def _drawn(model: TrafficModel, trace: Trace, seed: int) -> Iterator[tuple[float, SampleRecord]]:
    dice = random.Random(f"traffic/{model.seed}/{seed}")
    samples = list(trace.samples())
    at = dice.expovariate(model.rate)
    while at < model.for_s:
        yield at, dice.choice(samples)
        at += dice.expovariate(model.rate)


def _recorded(model: TrafficModel, trace: Trace) -> list[tuple[float, SampleRecord]]:
    """Raises CallerError if the trace has no arrival times."""
    samples = sorted(trace.samples(), key=lambda sample: sample.arrival_s)
    if not samples[-1].arrival_s:
        raise CallerError(
            f"trace {trace.name} has no arrival times of samples; set traffic.rate and "
            f"traffic.for_s in the scenario, or give samples an arrival_s"
        )
    until = model.for_s or float("inf")
    return [(sample.arrival_s, sample) for sample in samples if sample.arrival_s < until]
