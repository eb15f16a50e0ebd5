"""No number that a peer or a file states decides an allocation, a loop or an hour.

Two laws. Every integer that is decoded from outside has an upper bound in its type, so a new field
needs one. And a valid sample of each kind of input, with any of its numbers replaced by a hostile
one, is refused with an error of ours or read as usual, in little memory and about the usual time.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import gzip
import importlib
import io
import json
import re
import struct
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from backports import zstd
from msgspec import inspect

import rollout_sched
from rollout_sched.calibration import bursts
from rollout_sched.config import REGISTRY, load_policy
from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import Restored
from rollout_sched.core.model.records import (
    DeliveredGroup,
    DeliveredSample,
    GroupFacts,
    PromptFacts,
    RequestFacts,
    RunFacts,
    Segment,
)
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.timeline import journal_page
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.integrations.gateway.data_plane.answers import read_answer, read_event
from rollout_sched.integrations.verl import generate_call
from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.protocol.answers import spans_of
from rollout_sched.link import protocol
from rollout_sched.live.durable.recovery import recover
from rollout_sched.live.requests.token_payload import TokenTranscript
from rollout_sched.live.trainer import records
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces.command import statistics
from rollout_sched.store.store import Losses
from rollout_sched.store.transaction import Tokens, Transaction, encode
from tests import virtual_loop
from tests.core.told import make_scheduler
from tests.fuzz.bounds import cpu_limit
from tests.fuzz.corpus import kept
from tests.integrations.vllm.scripted import METRICS
from tests.link.fixtures import Stage

# -- the types ------------------------------------------------------------------------------------

#: Calls that decode by a type, and those that make flags or settings of one.
DECODES = re.compile(r"(?i)(decode|decoded|decoder|convert|add_flags|read_table)$")

#: The simulated server refuses what vLLM refuses; 64 bits of a hash cannot be a bound.
EXEMPT = ("rollout_sched.simulators.fake_instance", "digest", "dict[str, int]")


def decoded_types() -> Iterator[tuple[str, Any]]:
    """(place, type) of every call in the product that decodes by a type it names."""
    root = Path(rollout_sched.__file__).parent
    for path in map(Path, glob.glob(f"{root}/**/*.py", recursive=True)):
        name = ".".join(["rollout_sched", *path.relative_to(root).with_suffix("").parts])
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not DECODES.search(ast.unparse(call.func)):
                continue
            for said in [*call.args, *(keyword.value for keyword in call.keywords)]:
                try:
                    module = importlib.import_module(name.removesuffix(".__init__"))
                    kind = eval(ast.unparse(said), vars(module))
                except Exception:  # a variable of a function, or an optional dependency
                    continue
                if isinstance(kind, type) or typing.get_origin(kind) is not None:
                    yield f"{name}, {ast.unparse(said)}", kind


def unbounded(kind: Any, place: str, seen: set[type]) -> Iterator[str]:
    """The integers in a type that have no upper bound."""
    if isinstance(kind, inspect.IntType):
        if kind.le is None and kind.lt is None:
            yield place
    elif isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}", seen)
    else:
        for name in ("item_type", "key_type", "value_type", "type", "types", "item_types"):
            inner = getattr(kind, name, ())
            for one in (inner,) if isinstance(inner, inspect.Type) else inner or ():
                yield from unbounded(one, place, seen)


def test_every_number_that_is_decoded_has_an_upper_bound():
    seen: set[type] = set()
    kinds = [(place, kind) for place, kind in decoded_types() if not place.startswith(EXEMPT[0])]
    found = [
        one
        for place, kind in kinds
        for one in unbounded(inspect.type_info(kind), place, seen)
        if not one.endswith(EXEMPT[1:])
    ]
    assert not found, "give it a type of core.model.records, or a bound of its own"
    names = {kind.__name__ for kind in seen}
    assert names >= {"JournalHeader", "GroupSubmitted", "Reports", "RunFacts", "Scenario", "Turn"}
    assert names >= {"EventUsage", "Options", "Prompt", "Batch", "Document", "StoredWeights"}


# -- the readers ----------------------------------------------------------------------------------

HOSTILE = [10**9, 3 * 10**9, 2**63 - 1, 2**64, -1, 1e308]
NUMBER = re.compile(rb"(?<![\w.])-?\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")

#: Bytes beyond what the process has, and CPU seconds beyond 20 times those of the valid sample.
MEMORY = 512 * 2**20
SPENT_S = 1.0

TRACE = b'{"schema":"rollout-sched-trace/1"}\n' + b"".join(
    b'{"group":"g%d","sample":%d,"prompt_tokens":30,"turns":[[%d,10,0.3],[20,0,0.0]]}\n'
    % (group, sample, 40 + 20 * sample)
    for group in range(4)
    for sample in range(5)
)
SINGLE = re.sub(rb"\[\[.*?\],", b"[", TRACE)  # links do not take trajectories
SCENARIO = b"""
fleet = {instances = 2, kv_tokens = 100_000, block_size = 16, max_num_seqs = 8,
  max_num_batched_tokens = 512, max_model_len = 4096}
cost = {step_s = 6e-4, weights_s = 6e-3, token_s = 2e-5, exponent = 1.6, sequence_s = 4e-6,
  context_s = 3e-8, attention_s = 8e-10, request_s = 1e-5, prefill_s = 1e-4}
trainer = {fixed_s = 1.0, seconds_per_token = 7e-5}
weights = {fixed_s = 1.0, bytes = 15.2e9, bytes_per_s = 10e9}
visibility = {stream_s = 1.0, poll_s = 1.0}
job = {prompts_per_step = 2, samples_per_prompt = 2, max_tokens = 300, epochs = 2,
  known_samples = 1}
rewards = {seconds = 1.0, spread = 0.5, filtered = 0.2, seed = 2}
""".replace(b",\n ", b",")
BESIDE = b"""
traffic = {rate = 0.5, for_s = 5.0, patience_s = 60.0, max_tokens = 100, seed = 3}
faults = [
  {what = "lost", instance = 1, at_s = 0.5, returns_after_s = 1.0},
  {what = "scheduler_restarts", at_s = 1.2},
  {what = "failing", at_s = 0.0, for_s = 3.0, share = 0.1, after_s = 0.1, seed = 4},
  {what = "joins", instance = 1, at_s = 0.1},
]
"""
LINKS = b"links = {fronts = 2, delay_s = 0.1, spread = 0.5, token_s = 0.01}\n"


def replayed(folder: Path, scenario: bytes, policy: str, journal: str = "") -> None:
    (folder / "trace.jsonl").write_bytes(TRACE if b"links" not in scenario else SINGLE)
    (folder / "world.toml").write_bytes(scenario)
    trace, world = traces.read(folder / "trace.jsonl"), load_scenario(str(folder / "world.toml"))
    path = folder / journal if journal else None
    run_policy(load_policy(policy), trace, world, steps=2, seed=0, journal_path=path)


def read_journal(path: Path) -> None:
    recording = Recording(path, "partial_rollout")
    journal_page(recording)
    recorded_trace("recorded", [recording])


def read_whole_answer(path: Path) -> None:
    read_answer(path.read_bytes(), "completions", labelled=True)


def read_stream_event(path: Path) -> None:
    for choice in read_event(path.read_bytes()).choices or ():
        assert choice.ids.count(b",") < 9
        spans_of(choice.weight_versions, 2)


def plan_calibration(path: Path) -> None:
    room = msgspec.json.decode(path.read_bytes(), type=bursts.Room)
    assert len(bursts.bursts_of(room, bursts.Pace(1e-3, 1e-6), 2.0)) < 99


def read_generated(path: Path) -> None:
    generate_call.read(path.read_bytes()).extra_fields["versions"]


def read_metrics(path: Path) -> None:
    metrics_text.gauges(path.read_bytes())
    metrics_text.cache_config(path.read_bytes())


def read_link(path: Path) -> None:
    reports = msgspec.json.decode(path.read_bytes(), type=protocol.Reports)

    async def told() -> None:
        async with Stage(0) as stage:
            front = stage.host.connect("front", lambda frame: None)
            stage.group(samples=2)
            front.receive(protocol.encode(msgspec.structs.replace(reports, epoch=stage.host.epoch)))
            stage.host.disconnect(front)

    virtual_loop.run(told())


class Rows:
    """A store with these facts, and these pieces: (owner, ordinal, ids)."""

    folder = Path("store")
    losses = Losses()

    def __init__(
        self, facts: dict[str, dict[str, Any]], pieces: list[tuple[str, int, Any]]
    ) -> None:
        encoded = {
            kind: {n: records.encoded(f) for n, f in of.items()} for kind, of in facts.items()
        }
        self.facts = lambda kind: encoded.get(kind, {})
        self._pieces = [(owner, number, encode(Tokens(ids))) for owner, number, ids in pieces]

    def owners(self) -> list[str]:
        return [owner for owner, _, _ in self._pieces]

    def pieces(self, owner: str) -> dict[int, bytes]:
        return {number: data for whose, number, data in self._pieces if whose == owner}

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        return {number: data[:length] for number, data in self.pieces(owner).items()}


def read_store(path: Path) -> None:
    try:
        store: Any = Rows(*json.loads(path.read_bytes()))
    except (OverflowError, struct.error):  # no such number can be in a store
        return
    transcripts, changes = records.StoredTranscripts(store), Transaction()
    found = recover(store, transcripts)
    for owner in store.owners():
        transcripts.write(owner.removeprefix("r:"), TokenTranscript(), changes)
    if found.state is not None:
        make_scheduler(batching="sync").handle(Restored(found.state), found.state.run.now)


def read_trace(path: Path) -> None:
    statistics(traces.read(path))


def run_world(path: Path) -> None:
    replayed(path.parent, path.read_bytes(), "partial_rollout")


def run_policy_file(path: Path) -> None:
    replayed(path.parent, SCENARIO, str(path))


# -- valid samples of each kind -------------------------------------------------------------------

ANSWER = b"""{"id": "x", "choices": [{"index": 0, "text": "a b", "finish_reason": "stop",
  "token_ids": [5, 6], "weight_versions": [{"version": "3", "start": 0, "end": 2}]}],
  "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}"""
EVENT = b"""{"id": "x", "created": 1700000000, "choices": [{"index": 0, "text": "a b",
  "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3], "finish_reason": null,
  "weight_versions": [{"version": "3", "start": 0, "end": 2}]}],
  "usage": {"prompt_tokens": 3, "completion_tokens": 2}}"""
ROOM = b'{"slots": 64, "kv_tokens": 99999, "max_model_len": 4096}'
GENERATED = b"""{"choices": [{"token_ids": [5, 6], "finish_reason": "stop"}], "rollout_sched":
  {"segments": [{"version": 3, "start": 0, "end": 2, "instance": "i"}]}}"""
REPORTS = msgspec.json.encode(
    protocol.Reports(
        "",
        1,
        [
            ev.RequestSubmitted(
                "client", "", 3, 9, priority=1, prior_segments=(Segment(0, 1, "i"),)
            ),
            protocol.Streamed("g/0", 1, 0, encode(Tokens([5, 6]))),
            ev.TokensArrived("g/0", 1, 2),
            protocol.PieceMade("g/0", 1, encode(Tokens([7])), 2),
            ev.RequestFinished("g/0", 1, 3, ((0, 3),)),
            protocol.PieceMade("g/1", 2, encode(Tokens([7])), 0),
            ev.RequestInterrupted("g/1", 2, 1, ((0, 1),)),
        ],
    )
)


def stored() -> bytes:
    def sample(group: str, index: int) -> DeliveredSample:
        made = (Segment(1, 2, "i"),)
        return DeliveredSample(f"{group}/{index}", group, index, 3, 2, made, 0, "stop")

    made = (Segment(1, 2, "i"),)
    requests = (RequestFacts(0, 5, "finished", made, finish="stop", last_attempt=4, turn=0),)
    group = GroupFacts("g", 4, 2, 3, 9, state="active", finished=(0,), requests=requests)
    prompts = [Prompt(uid, [1], 2, 9) for uid in ("g", "h")]
    deliver = Deliver(1, 1, (sample("h", 0), sample("h", 1)), 1)
    run = RunFacts(9.0, 1, batches=2, parts=0, delivered=1, serials=9, attempts=9, instances=1)
    facts = {
        records.RUN: {records.ONE: run},
        records.GROUP: {"g": group},
        records.PROMPT: {each.uid: records.StoredPrompt(each, tool=False) for each in prompts},
        records.DELIVERED: {"1.1": deliver},
        records.LEASE: {"1": LeaseFacts("trainer")},
        records.ACKNOWLEDGED: {"0": {"a": 5}},
        records.LOST: {"0:z": records.StoredLoss("gone", 0, 7)},
        records.RECENT: {records.ONE: [DeliveredGroup(3, (2, 2))]},
        records.LENGTHS: {"p": PromptFacts("p", ((2, 2),))},
        records.LAST_REPORT: {records.ONE: 0},
    }
    pieces = [("p:g", 0, [1, 2, 3]), ("p:h", 0, [1, 2, 3])]
    pieces += [(f"r:{name}", 4 * 2**24, [8, 9]) for name in ("g/0", "h/0", "h/1")]
    return msgspec.json.encode([facts, pieces])


def journaled(folder: Path) -> bytes:
    """A journal with a restart, tools and clients; one line for each kind of event is enough."""
    replayed(folder, SCENARIO + BESIDE, "partial_rollout", "run.journal")
    return (folder / "run.journal").read_bytes()


def policies() -> Iterator[str]:
    """A policy file for every class that has numbers, with their defaults."""
    beside = {"one_step_off": '\nfreshness = {use = "bounded", max_staleness = 1}'}
    for role, classes in REGISTRY.items():
        for use, cls in classes.items():
            fields = msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else ()
            numbers = [f"{f.name} = {f.default}" for f in fields if type(f.default) in (int, float)]
            if numbers:
                yield f'{role} = {{use = "{use}", {", ".join(numbers)}}}' + beside.get(use, "")


def once(data: bytes) -> Iterator[tuple[int, int]]:
    """The numbers of a document; of those after the same word in lines of a kind, the first few."""
    seen: Counter[bytes] = Counter()
    start = 0
    for line in data.splitlines(keepends=True):
        kind = NUMBER.sub(b"", line)[:50]
        for found in NUMBER.finditer(line):
            words = re.findall(rb"[a-z_]\w+", line[: found.start()])
            place = b"%b %b" % (kind, words[-1] if words else b"")
            seen[place] += 1
            if seen[place] <= 3:
                yield start + found.start(), start + found.end()
        start += len(line)


def hostile(data: bytes) -> Iterator[bytes]:
    for start, end in once(data):
        for value in HOSTILE:
            yield data[:start] + str(value).encode() + data[end:]


def spent_s(read: Callable[[Path], None], path: Path, data: bytes, limit_s: float) -> float:
    """CPU seconds. Raises Broken, MemoryError, or an error of the reader that is none of ours."""
    path.write_bytes(data)
    before = time.process_time()
    with cpu_limit(limit_s, MEMORY), contextlib.suppress(RolloutError, msgspec.ValidationError):
        read(path)
    return time.process_time() - before


def as_it_is(data: bytes) -> Callable[[Path], bytes]:
    return lambda _: data


#: How each kind is read, and a valid sample of it.
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], bytes]]] = {
    "answer.json": (read_whole_answer, lambda _: ANSWER),
    "event.json": (read_stream_event, lambda _: EVENT),
    "generated.json": (read_generated, lambda _: GENERATED),
    "room.json": (plan_calibration, lambda _: ROOM),
    "metrics.txt": (read_metrics, lambda _: METRICS.encode()),
    "link.json": (read_link, lambda _: REPORTS),
    "store.json": (read_store, lambda _: stored()),
    "journal.jsonl": (read_journal, journaled),
    "world.toml": (run_world, lambda _: SCENARIO + BESIDE),
    **{
        f"trace{number}": (read_trace, as_it_is(data))
        for number, data in enumerate(kept("traces"))
        if data.isascii()
    },
    "links.toml": (run_world, lambda _: SCENARIO.partition(b"trainer")[0] + LINKS),
    **{
        f"{line.split()[0]}{n}.toml": (run_policy_file, as_it_is(line.encode()))
        for n, line in enumerate(policies())
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_a_hostile_number_costs_nothing(name, tmp_path):
    read, sample = KINDS[name]
    valid = sample(tmp_path)
    (tmp_path / name).write_bytes(valid)
    if not name.startswith("trace"):  # some of these are of errors
        read(tmp_path / name)
    limit_s = SPENT_S + 20 * spent_s(read, tmp_path / name, valid, 60.0)
    for data in hostile(valid):
        try:
            spent_s(read, tmp_path / name, data, limit_s)
        except BaseException as error:
            pytest.fail(f"{error!r} for {data[:2000]!r}")


# -- packed files ---------------------------------------------------------------------------------

HEADER = b"group,prompt_tokens,response_tokens\n"


def parquet_of(rows: int, group: str) -> bytes:
    """Equal rows, of which a Parquet file holds only one and their number."""
    pyarrow = pytest.importorskip("pyarrow")
    written, one = io.BytesIO(), pyarrow.array([1], pyarrow.int8())
    ones = one.take(pyarrow.array(bytes(rows), pyarrow.int8()))
    columns = {"group": ones.dictionary_encode(), "prompt_tokens": ones, "response_tokens": ones}
    columns["group"] = pyarrow.DictionaryArray.from_arrays(columns["group"].indices, [group])
    parquet = importlib.import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), written, compression="zstd", store_schema=False)
    return written.getvalue()


@pytest.mark.parametrize(
    "bomb",
    [
        lambda: gzip.compress(HEADER + b"\n" * 4 * 10**6, 1),
        lambda: gzip.compress(HEADER + b"1" * 4 * 10**6, 1),
        lambda: zstd.compress(HEADER + b"1,1,1\n" * 10**6),
        lambda: parquet_of(2 * 10**5, "g"),
        lambda: parquet_of(1000, "g" * 10**5),
    ],
)
def test_a_file_that_unpacks_to_far_more_than_it_is_is_refused(bomb, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(bomb())
    with cpu_limit(30.0, MEMORY), pytest.raises(traces.TraceError, match="it unpacks to more"):
        traces.read(path)
