"""Our wire against the classes and functions of SGLang's wheel.

The package itself needs CUDA to be imported. So classes and functions are taken out of its source
files, as they stand there, and run without the rest.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.sglang import EngineInstance, protocol
from rollout_sched.integrations.sglang.calls import Load
from rollout_sched.integrations.sglang.instance import SglangGenerate
from rollout_sched.integrations.sglang.protocol import FinishReason, read_answer
from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from tests.simulators.fake_instance.served import SPEC

found = find_spec("sglang")
assert found is not None
assert found.submodule_search_locations is not None
SRT = Path(next(iter(found.submodule_search_locations))) / "srt"


def taken(file: str, *names: str, **given: Any) -> dict[str, Any]:
    """The named classes and functions of a source file, defined in its order."""
    nodes = [
        node
        for node in ast.parse((SRT / file).read_text()).body
        if getattr(node, "name", None) in names
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names)
    ]
    space = {**vars(typing), "msgspec": msgspec, "dataclasses": dataclasses, **given}
    code = ast.unparse(ast.Module(nodes, []))
    exec(compile(code, file, "exec", dont_inherit=True), space)
    return space


def fields_of(file: str, name: str) -> set[str]:
    """The annotated fields of a class, without running it."""
    for node in ast.parse((SRT / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {str(one.target.id) for one in node.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
    raise AssertionError(f"{file} has no {name}")


IO = "managers/io_struct.py"

#: The class of each call's body, by its path.
BODIES = {
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/update_weights_from_ipc": "UpdateWeightsFromIPCReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
}


class _Anything:
    """Stands for what a class mentions and we do not send."""

    def __class_getitem__(cls, _: Any) -> Any:
        return Any


STRUCTS = taken(
    IO,
    "BaseReq",
    *BODIES.values(),
    Base64Bytes=lambda: None,
    FinishReasonDict=dict,
    WeightVersionSpans=list,
)


def check_body(path: str, body: dict[str, Any]) -> None:
    """As SGLang's server parses it: each field by its name and type, none left out."""
    struct = STRUCTS[BODIES[path]]
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    assert set(body) <= set(fields), path
    assert {name for name, field in fields.items() if field.required} <= set(body), path
    for name, value in body.items():
        if name != "serialized_named_tensors":  # in base64, by its marker
            msgspec.convert(value, fields[name].type)


class _Recorded:
    """Stands for the connection: what was posted, and answers of a server that agrees."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    async def call(self, path: str, body: Any, **_: Any) -> bytes:
        self.posted.append((path.partition("?")[0], body))
        return b"{}"


async def all_calls() -> list[tuple[str, Any]]:
    """Every control call that the client makes."""
    instance, recorded = EngineInstance("http://a:1"), _Recorded()
    calls = instance._detect.args[0]  # type: ignore[attr-defined]
    calls.control = recorded
    await calls.abort(["run-1."])
    for mode, clear in (("keep", False), ("keep", True), ("abort", True)):
        await calls.pause(mode, clear)
    await calls.resume()
    await calls.set_version(3)
    await calls.collective_rpc("reload_weights", {"weights_path": "/w"}, None)
    group = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 3}
    await calls.weight_transfer("init_weight_transfer_engine", {"init_info": group}, None)
    for start in ("start_weight_update", "start_draft_weight_update"):
        for info in (
            {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]]},
            {"serialized_named_tensors": ["gA"]},
            {"zmq_handles": {"GPU-0": "ipc:///x"}},
        ):
            await calls.weight_transfer(start, {}, None)
            await calls.weight_transfer("update_weights", {"update_info": info}, None)
            await calls.weight_transfer("finish_weight_update", {}, None)
    return recorded.posted


def test_control_calls_have_the_fields_of_sglangs_classes() -> None:
    posted = asyncio.run(all_calls())
    assert {path for path, _ in posted} == {*BODIES, protocol.FLUSH}
    for path, body in posted:
        if path != protocol.FLUSH:
            check_body(path, body)
    for path, defaults in {"/update_weight_version": "abort_all_requests"}.items():
        struct = STRUCTS[BODIES[path]]
        (field,) = [each for each in msgspec.structs.fields(struct) if each.name == defaults]
        assert field.default is True, "the trap is still there"


def test_the_paths_are_there() -> None:
    sources = [SRT / "entrypoints" / name for name in ("http_server.py", "v1_loads.py")]
    text = "".join(path.read_text() for path in sources)
    offered = set(re.findall(r'@(?:app|router)\.\w+\(\s*"(/[^"]*)"', text))
    named = [value for name, value in vars(protocol).items() if name.isupper()]
    ours = {value for value in named if isinstance(value, str)}
    assert {path.partition("?")[0] for path in ours} <= offered
    assert {*BODIES, "/tokenize", "/detokenize", "/v1/models"} <= offered


# -- /generate ------------------------------------------------------------------------------


SAMPLING = taken(
    "sampling/sampling_params.py",
    *("SamplingParams", "TOP_K_ALL", "_SAMPLING_EPS", "_JsonScalar", "CustomParamValue"),
    *("MAX_STOP_COUNT", "MAX_STOP_REGEX_LEN", "MAX_STOP_REGEX_COUNT"),
    WatermarkRequestConfig=_Anything,
    normalize_watermark_request=lambda told: told,
    get_request_reasoning_end_token_ids=lambda *_, **__: None,
    math=__import__("math"),
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(0, 50),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.1, 2),
            "stop": st.lists(st.text(min_size=1), min_size=1, max_size=3),
            "stop_token_ids": st.lists(st.integers(0, 99), min_size=1),
            "min_tokens": st.integers(0, 4),
            "seed": st.integers(0, 2**40),
            "ignore_eos": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "logprobs": st.just(0),
            "logit_bias": st.just({"3": 1.0}),
        },
    ),
    st.booleans(),
)
def test_an_order_is_a_request_that_sglang_takes(sampling: dict[str, Any], stream: bool) -> None:
    order = Order("run-1", [1, 2], 8, "v3", sampling, stream_every=4 if stream else 0)
    body = msgspec.json.decode(SglangGenerate().body(order, "model"))
    assert set(body) <= fields_of(IO, "GenerateReqInput")
    told = SAMPLING["SamplingParams"](**body["sampling_params"])
    told.verify(1000)
    assert (told.max_new_tokens, told.min_new_tokens) == (8, sampling.get("min_tokens", 0))
    assert body["return_logprob"] is ("logprobs" in sampling)
    assert told.stream_interval == (4 if stream else None)


SPANS = taken(
    "utils/weight_versions.py",
    *("WeightVersionSpan", "WeightVersionSpans", "WeightVersionEvent"),
    *("compute_weight_version_spans", "add_weight_versions_to_meta_info"),
)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4), st.integers(0, 30))
def test_spans_that_sglang_computes_are_read(events: list[tuple[int, int]], more: int) -> None:
    """`events`: labels that were replaced after so many more tokens."""
    made, told = 0, []
    for label, tokens in events:
        made += tokens
        if made:  # SGLang notes no change before the first token
            told.append(SPANS["WeightVersionEvent"](old_version=str(label), num_output_tokens=made))
    made += more
    spans = SPANS["compute_weight_version_spans"](told, "9", made)
    meta: dict[str, Any] = {"id": "run-1.", "completion_tokens": made}
    SPANS["add_weight_versions_to_meta_info"](meta, spans, made)
    answer = {"output_ids": [1] * made, "meta_info": {**meta, "finish_reason": {"type": "stop"}}}
    read = SglangGenerate().read(msgspec.json.encode(answer))
    assert read.versions is not None
    covered = [token for span in read.versions for token in range(span.start, span.end)]
    assert covered == list(range(made))


def ends() -> Iterator[Any]:
    names = "FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISH_LENGTH", "FINISH_ABORT"
    space = taken("managers/schedule_batch.py", "BaseFinishReason", *names)
    yield from (space[names[0]](7), space[names[1]]("x"), space[names[2]](3), space[names[3]]())


def test_the_ends_of_sglangs_answers_are_read() -> None:
    read = [msgspec.convert(end.to_json(), FinishReason).type for end in ends()]
    assert read == ["stop", "stop", "length", "abort"]


def meta_names() -> set[str]:
    """Every name that SGLang writes into an answer's meta_info."""
    text = (SRT / "managers/tokenizer_manager.py").read_text()
    text += (SRT / "utils/weight_versions.py").read_text()
    return set(re.findall(r'"(\w+)"(?::|\])', text))


async def fake_answers() -> list[dict[str, Any]]:
    server = FakeServer(EngineSettings(SPEC, speed=1000.0), dialect="sglang")
    port = await server.start("127.0.0.1", 0)
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.post("/generate", json=body) as answer:
                whole = await answer.json()
            async with session.post("/generate", json={**body, "stream": True}) as answer:
                events = (await answer.read()).split(b"\n\n")
            async with session.get("/v1/loads", params={"include": "core"}) as answer:
                loads = await answer.json()
    finally:
        await server.close()
    told = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events[:-2]]
    return [loads["loads"][0], whole, *told]


def test_the_simulated_server_answers_with_sglangs_names() -> None:
    load, *answers = asyncio.run(fake_answers())
    core = fields_of("managers/load_snapshot.py", "LoadSnapshot")
    assert set(load) <= core
    assert set(Load.__struct_fields__) <= core
    for answer in answers:
        assert set(answer) == {"text", "output_ids", "meta_info"}
        assert set(answer["meta_info"]) <= meta_names()
        assert read_answer(msgspec.json.encode(answer)).output_ids == answer["output_ids"]


@pytest.mark.parametrize("call", ["model_info", "server_info"])
def test_what_we_read_of_a_server_is_there(call: str) -> None:
    names: Sequence[str] = ("model_path", "weight_version", "served_model_name")
    text = (SRT / "entrypoints/http_server.py").read_text()
    if call == "server_info":
        names = ("tp_size", "pp_size", "page_size", "chunked_prefill_size", "disable_radix_cache")
        text = "".join(path.read_text() for path in (SRT / "arg_groups/fields").glob("*.py"))
    assert [name for name in names if not re.search(rf'["\s]{name}[":]', text)] == []
