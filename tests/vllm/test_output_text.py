"""The simulated server makes of tokens what vLLM makes of them: text, stops, names in log-probs."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from rollout_sched.simulators.fake_instance import fields
from rollout_sched.simulators.fake_instance.fields import Detokenizer, OutputText
from rollout_sched.simulators.fake_instance.tokens import CHARACTERS

TINY = runpy.run_path(str(Path(__file__).with_name("tiny_model.py")))["build_tokenizer"](300)
#: Bytes of characters, whole and in part, and some that are none.
BYTES = [*TINY.encode("aab b€é😀中"), *TINY.encode("\ufffd")[:2]]
IDS = st.lists(st.sampled_from(BYTES), max_size=24)
STOPS = st.lists(st.sampled_from(["a", "ab", "b a", "é", "€a", "😀"]), max_size=2)


@pytest.fixture(autouse=True, scope="module")
def tiny_tokens() -> Any:
    """The ids of the simulated server have the text of the tiny model's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields.text, "decode", decode)
        yield


def decode(ids: Sequence[int], vocabulary: Any = None) -> str:
    text: str = TINY.decode(list(ids), skip_special_tokens=True)
    return text


@settings(max_examples=1500, deadline=None)
@given(
    prompt=IDS.filter(bool),
    ids=IDS,
    stop=STOPS,
    included=st.booleans(),
    least=st.integers(0, 6),
    chunk=st.integers(1, 4),
    stopped=st.booleans(),
)
def test_text_and_stops(
    prompt: list[int],
    ids: list[int],
    stop: list[str],
    included: bool,
    least: int,
    chunk: int,
    stopped: bool,
) -> None:
    named = {"stop": stop, "include_stop_str_in_output": included, "min_tokens": least}
    params = SamplingParams(**named, max_tokens=100)
    request = SimpleNamespace(request_id="r", sampling_params=params, prompt_token_ids=prompt)
    theirs = FastIncrementalDetokenizer(TINY, request)
    ours = Detokenizer(fields.limits_of(named), prompt, CHARACTERS)
    for at in range(0, len(ids), chunk):
        part, last = ids[at : at + chunk], at + chunk >= len(ids)
        found = theirs.update(list(part), stopped and last)
        assert ours.update(part, stopped and last) == found
        finished = last or found is not None
        text = theirs.get_next_output_text(finished, True)
        assert ours.next_text(finished=finished) == text
        assert ours.text == theirs.output_text
        if finished:
            break


@settings(max_examples=500, deadline=None)
@given(ids=IDS)
def test_names_of_tokens(ids: list[int]) -> None:
    tokenizer = SimpleNamespace(decode=decode)
    theirs = LogprobsProcessor(tokenizer, [], None, 0.0, 0, None)  # type: ignore[arg-type]
    output = OutputText({}, [1], CHARACTERS)
    for at, token in enumerate(ids):
        context = ids[max(0, at - 4) : at]
        (name,) = theirs._verify_tokens([decode([token])], [token], context)
        assert output.names([token]) == [name]
