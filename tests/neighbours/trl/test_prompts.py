"""What a trainer of TRL's asks for, as groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_sched.integrations.trl.rollout_func import Prompts
from tests.neighbours.trl import fixtures


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(fixtures.write_model(tmp_path_factory.mktemp("model")))


def test_text(tokenizer: Any, tmp_path: Path) -> None:
    prompts = Prompts(fixtures.config(tmp_path, temperature=0.5), tokenizer)
    one, two = prompts.groups_of(["ab", "c"], 3, first=7)
    assert one.prompt_ids == tokenizer("ab")["input_ids"]
    assert (one.samples, one.max_tokens) == (3, fixtures.COMPLETION_TOKENS)
    assert one.sampling["temperature"] == 0.5
    assert one.sampling["logprobs"] == 0
    assert one.uid.endswith("/7")
    assert two.uid.endswith("/8")


def test_messages_go_through_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    prompts = Prompts(fixtures.config(tmp_path), tokenizer)
    (group,) = prompts.groups_of([[{"role": "user", "content": "ab"}]], 1, first=0)
    assert group.prompt_ids == tokenizer("ab\n")["input_ids"]


def test_every_sample_has_its_own_seed(tokenizer: Any, tmp_path: Path) -> None:
    groups = Prompts(fixtures.config(tmp_path), tokenizer).groups_of(["a", "b"], 4, first=0)
    seeds = [each["seed"] for group in groups for each in group.each]
    assert len(set(seeds)) == len(seeds) == 8


def test_a_prompt_has_one_key_in_every_epoch(tokenizer: Any, tmp_path: Path) -> None:
    args = fixtures.config(tmp_path)
    (first,) = Prompts(args, tokenizer).groups_of(["a"], 1, first=0)
    again, other = Prompts(args, tokenizer).groups_of(["a", "b"], 1, first=0)
    assert first.prompt_key == again.prompt_key != other.prompt_key
    assert first.uid != again.uid, "two runs may share a gateway"


def test_what_the_config_adds(tokenizer: Any, tmp_path: Path) -> None:
    args = fixtures.config(tmp_path, generation_kwargs={"presence_penalty": 0.5, "top_p": 0.9})
    (group,) = Prompts(args, tokenizer).groups_of(["a"], 1, first=0)
    assert (group.sampling["presence_penalty"], group.sampling["top_p"]) == (0.5, 0.9)


def test_no_prompts(tokenizer: Any, tmp_path: Path) -> None:
    assert Prompts(fixtures.config(tmp_path), tokenizer).groups_of([], 1, first=0) == []
