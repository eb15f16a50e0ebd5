"""A tokenizer of a few hundred tokens with Qwen3's special ones, made here: no hub is asked."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZE = 1024

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def make_tokenizer(folder: Path) -> None:
    """Bytes first, then words that no text is made of, and the special ones at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"word{number}" for number in range(len(letters), SIZE - len(SPECIAL))]
    ids = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == SIZE
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(
        folder
    )
