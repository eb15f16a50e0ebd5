#!/usr/bin/env python3
"""Write a tiny random-weight causal LM + locally built tokenizer that vLLM can serve offline.

    python tiny_model.py OUT [--seed 0] [--layers 2] [--hidden 128] [--heads 4] [--kv-heads 2]
                             [--vocab 2048] [--max-pos 16384] [--arch llama|qwen2|qwen3]
                             [--dtype float32]

Two calls with the same sizes and different --seed give two "policy versions" of one model.
No download: the tokenizer is a byte-level BPE with 256 byte symbols + filler tokens.
"""

import argparse
import json
import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<s>", "</s>"]
    toks = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    toks += [f"w{i}" for i in range(vocab_size - len(toks))]  # never produced by encode (no merges)
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(toks)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=1 << 20,
        chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--max-pos", type=int, default=16384)
    p.add_argument("--arch", choices=["llama", "qwen2", "qwen3"], default="llama")
    p.add_argument("--dtype", default="float32")
    a = p.parse_args(argv)
    torch.manual_seed(a.seed)
    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[a.arch]
    cfg = cls(
        vocab_size=a.vocab,
        hidden_size=a.hidden,
        intermediate_size=a.hidden * 3,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.hidden // a.heads,
        max_position_embeddings=a.max_pos,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(cfg).to(getattr(torch, a.dtype))
    # HF's std 0.02 init makes near-uniform logits; widen so that output depends on context.
    with torch.no_grad():
        for n, w in model.named_parameters():
            if "norm" not in n:
                w.normal_(0.0, 1.0 if "embed" in n else 2.0 / a.hidden**0.5)
    model.save_pretrained(a.out, safe_serialization=True)
    build_tokenizer(a.vocab).save_pretrained(a.out)
    with open(os.path.join(a.out, "generation_config.json"), "w") as f:
        json.dump({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, f)
    print(a.out, sum(x.numel() for x in model.parameters()), "params", sorted(os.listdir(a.out)))


if __name__ == "__main__":
    main()
