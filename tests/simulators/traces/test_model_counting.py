"""Tokens of texts and of seconds, and a real tokenizer, made here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from rollout_sched.simulators.traces import Counting, TraceError, read, with_tokenizer

WORDS = ["[UNK]", "<s>", "what", "is", "one", "and", "two"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer of words, which puts a token of its own before a prompt."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_by_characters_and_by_seconds() -> None:
    counting = Counting(chars_per_token=2, tokens_per_s=10)
    assert [counting(text) for text in ("", "abc", "abcd")] == [1, 2, 2]
    assert [counting.of_seconds(seconds) for seconds in (0, 0.01, 2.55)] == [1, 1, 26]
    assert (counting.label, counting.label_of_seconds) == ("characters / 2", "seconds * 10")


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_by_a_tokenizer_without_what_it_adds(model: Path, file: str) -> None:
    counting = with_tokenizer(model / file, Counting(tokens_per_s=7))
    assert counting("what is one and one?") == 6
    assert (counting.label, counting.tokens_per_s) == ("tokenizer", 7)


def test_a_dump_is_counted_and_says_so(model: Path, tmp_path: Path) -> None:
    dump = tmp_path / "1.jsonl"
    dump.write_text('{"input":"what is one and one","output":"two"}\n')
    trace = read(dump, with_tokenizer(model))
    (sample,) = trace.samples()
    assert (sample.prompt_tokens, sample.response_tokens) == (5, 1)
    assert trace.estimated_by == ""
    assert read(dump).estimated_by == "characters / 3.3"


def test_an_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no tokenizer\.json; name that of the model"):
        with_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match=r"no tokenizer \("):
        with_tokenizer(tmp_path)


def test_without_the_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TraceError, match=r"pip install .*\[tokenizer\]"):
        with_tokenizer(model)
