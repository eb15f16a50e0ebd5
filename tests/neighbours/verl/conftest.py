"""Ray, TransferQueue and verl's configuration of a tiny model, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import ray
import transfer_queue
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from ray import cloudpickle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

#: Bytes of Ray's object store: what is passed here are a few thousand tokens.
OBJECT_STORE = 100 * 2**20

#: Tokens of the longest prompt and response.
PROMPT_LENGTH, RESPONSE_LENGTH = 64, 256

VOCABULARY = 512

HERE = Path(__file__).parent


def _module(path: Path) -> ModuleType:
    """By its path: the wheels of verl and TransferQueue bring a package `tests` of their own."""
    spec = importlib.util.spec_from_file_location(f"neighbours_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # Ray's workers do not find it
    return module


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """`tests/neighbours/fleet.py`."""
    return _module(HERE.parent / "fleet.py")


@pytest.fixture(scope="session")
def engine() -> ModuleType:
    """`engine.py` beside this."""
    return _module(HERE / "engine.py")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, object_store_memory=OBJECT_STORE, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture
def queue(cluster: None) -> Iterator[None]:
    """An empty TransferQueue; its controller and its storage take a core each."""
    storage = {"SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init(OmegaConf.create({"backend": storage}))
    try:
        yield
    finally:
        transfer_queue.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what verl reads of a model that it does not run: configuration, tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


@pytest.fixture
def config(model: Path) -> DictConfig:
    """verl's own, for two groups of three in a step."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"actor_rollout_ref.rollout.prompt_length={PROMPT_LENGTH}",
                f"actor_rollout_ref.rollout.response_length={RESPONSE_LENGTH}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=3",
                "actor_rollout_ref.rollout.val_kwargs.n=1",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "data.train_batch_size=2",
            ],
        )
