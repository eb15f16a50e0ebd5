"""Generates GRPOTrainer's completions in groups with a scheduler, and sends it weights."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_sched.client import Batch, BlockingRollouts, Reload, Sample, Tool
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.torch import Checkpoints
from rollout_sched.live.trainer.samples import Prompt

if TYPE_CHECKING:
    import torch

#: Sampling fields of GRPOConfig and AsyncGRPOConfig that have vLLM's names.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Prompts:
    """Makes groups of prompts with a TRL config (GRPOConfig or AsyncGRPOConfig) and the trainer's
    tokenizer or processor.

    Every sample has its own seed: instances that were started with the same seed sample the same
    tokens, so siblings on two such instances would get the same text.
    """

    def __init__(self, args: Any, processing_class: Any) -> None:
        self._args = args
        self._processing_class = processing_class
        self._rng = random.Random(args.seed)
        self._run = uuid.uuid4().hex

    def groups_of(self, prompts: Sequence[Any], samples: int, first: int) -> list[Prompt]:
        """A group of `samples` samples for each prompt (text or messages). The groups are numbered
        from `first`; the number is part of the uid."""
        return [
            Prompt(
                f"{self._run}/{number}",
                token_ids,
                samples,
                self._args.max_completion_length,
                self._sampling(),
                [{"seed": self._rng.getrandbits(63)} for _ in range(samples)],
                prompt_key=_key(token_ids),
            )
            for number, token_ids in enumerate(self.tokenized(prompts), first)
        ]

    def tokenized(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids as in TRL: messages by the chat template, with the generation prompt."""
        if not prompts:
            return []
        if isinstance(prompts[0], str):
            ids = self._processing_class(text=list(prompts))["input_ids"]
        else:
            ids = self._processing_class.apply_chat_template(
                conversation=list(prompts),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **(self._args.chat_template_kwargs or {}),
            )["input_ids"]
        return [list(token_ids) for token_ids in ids]

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self._args, name) for name in _SAMPLING}
        extra = getattr(self._args, "generation_kwargs", None) or {}
        known = {name: value for name, value in given.items() if value is not None}
        return {**known, "logprobs": 0, **extra}


def _key(token_ids: Sequence[int]) -> str:
    """A key that is the same for the same prompt in every epoch."""
    return hashlib.blake2b(repr(token_ids).encode(), digest_size=16).hexdigest()


#: Seconds between two checks whether the expected batch can still come.
POLL_S = 1.0

_FILTERED = (
    "the group was filtered, but this trainer needs every prompt; start the scheduler without keep"
)


class RolloutFunc:
    """GRPOTrainer's `rollout_func` (TRL 1.16): one completion for each prompt.

    rollouts  the scheduler; its `prompts_per_step` must divide the number of different prompts that
              the trainer generates for at a time: its generation batch over `num_generations`
    weights   publishes the trainer's weights before the first completion of a step. If None, TRL
              does (`use_vllm=True, vllm_mode="server"`, the gateway as `vllm_server_base_url`)
    tool      called between the turns of each completion, see `RolloutScheduler.submit`

    The trainer waits for the completions of exactly these prompts, so each is generated with the
    weights of its step, whatever staleness the policy allows. Use AsyncGRPOTrainer for policies
    that run ahead.
    """

    def __init__(
        self,
        rollouts: BlockingRollouts,
        *,
        weights: CheckpointTransfer | None = None,
        tool: Tool | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._weights = weights
        self._tool = tool
        self._prompts: Prompts | None = None
        self._submitted = 0
        self._step = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """`prompts` of this process: each one is repeated, in a row, once for each completion.

        prompt_ids, completion_ids  token ids, one list for each of `prompts`
        logprobs                    of each completion's tokens, from the weights that made them
        env_mask                    with a tool: 1 for tokens of the model, 0 for the tool's
        reward                      if the scheduler has a reward function; TRL passes it to its own
                                    reward functions, which may return it unchanged

        Raises CallerError, on every process, if the completions cannot be generated.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        self._publish(trainer)
        everyone = gather_object(prompts)
        answer: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            try:
                answer = [self._roll_out(everyone, trainer)]
            except Exception as error:  # the other processes wait for an answer
                answer = [error]
        broadcast_object_list(answer, from_process=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        begin = trainer.accelerator.process_index * len(prompts)
        return _columns(answer[0][begin : begin + len(prompts)], masks=self._tool is not None)

    def _publish(self, trainer: Any) -> None:
        """Publish once for each step; every process takes part in gathering the parameters."""
        step = trainer.state.global_step
        if self._weights is None or step == self._step:
            return
        self._step = step
        parameters = _whole_parameters(trainer)
        if trainer.accelerator.is_main_process:
            self._weights.send_weights(parameters.items())

    def _roll_out(self, prompts: list[Any], trainer: Any) -> list[Sample]:
        """The samples of all processes, in the order of `prompts`."""
        training = trainer.model.training
        samples = trainer.num_generations if training else trainer.num_generations_eval
        different = _every(samples, prompts)
        self._check(len(different))
        if self._prompts is None:
            self._prompts = Prompts(trainer.args, trainer.processing_class)
        groups = self._prompts.groups_of(different, samples, self._submitted)
        self._submitted += len(groups)
        self._rollouts.submit(groups, tool=self._tool)
        made = self._collect({group.uid for group in groups})
        return [sample for group in groups for sample in made[group.uid]]

    def _check(self, groups: int) -> None:
        """A batch that is larger than the submitted groups would never be complete."""
        batch = self._rollouts.state()["prompts_per_step"]
        if groups % batch:
            raise CallerError(
                f"the trainer generates for {groups} different prompts at a time, but a batch of "
                f"the scheduler has {batch}: start the scheduler with prompts_per_step={groups}"
            )

    def _collect(self, missing: set[str]) -> dict[str, list[Sample]]:
        made: dict[str, list[Sample]] = {}
        while missing:
            batch = self._next_batch(missing)
            _raise_failed({failed.uid: failed.reason for failed in batch.failed}, missing)
            _raise_failed(dict.fromkeys(batch.filtered, _FILTERED), missing)
            groups = batch.groups()
            made.update((uid, sorted(groups[uid], key=_index)) for uid in groups)
            missing -= groups.keys()
        return made

    def _next_batch(self, missing: set[str]) -> Batch:
        """The next batch. If a group of it can never be complete, the batch never comes, so the
        scheduler's state is checked while waiting."""
        coming = self._rollouts.start(lambda rollouts: rollouts.next_batch())
        try:
            while not wait([coming], POLL_S).done:
                state = self._rollouts.state()
                _raise_failed(state["failed"], missing)
                _raise_failed(dict.fromkeys(state["filtered"], _FILTERED), missing)
        finally:
            coming.cancel()
        batch = coming.result()
        if batch is None:
            raise CallerError("submissions are closed: the trainer needs its own scheduler")
        return batch


def _raise_failed(failed: Mapping[str, str], missing: set[str]) -> None:
    for uid in missing & failed.keys():
        raise CallerError(f"completions could not be generated: {failed[uid]}")


def _index(sample: Sample) -> int:
    return sample.index


def _every(samples: int, prompts: Sequence[Any]) -> list[Any]:
    """The distinct prompts of a list that has each one `samples` times in a row."""
    different = list(prompts[::samples])
    if len(prompts) % samples or any(
        prompt != different[place // samples] for place, prompt in enumerate(prompts)
    ):
        raise CallerError(
            f"each prompt must come {samples} times in a row, as from GRPOTrainer's sampler"
        )
    return different


def _columns(samples: Sequence[Sample], *, masks: bool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "prompt_ids": [sample.prompt_ids for sample in samples],
        "completion_ids": [sample.response_ids for sample in samples],
        "logprobs": [sample.rollout_log_probs for sample in samples],
    }
    if masks:
        columns["env_mask"] = [sample.response_mask for sample in samples]
    if all(sample.reward is not None for sample in samples):
        columns["reward"] = [sample.reward for sample in samples]
    return columns


def _whole_parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """Full parameters by the names of the model's checkpoint; tied parameters come once."""
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise CallerError(
            "adapters are not merged: let TRL send the weights (use_vllm), or train all parameters"
        )
    whole = trainer.accelerator.get_state_dict(trainer.model)
    first = {tensor.data_ptr(): name for name, tensor in reversed(whole.items())}
    return {name: tensor for name, tensor in whole.items() if first[tensor.data_ptr()] == name}


# ------------------------------------------------------------------------------------------
# Sends a trainer's weights to the fleet through a shared disk.


class CheckpointTransfer:
    """The `weight_transfer` of AsyncGRPOTrainer (`WeightTransferProtocol`) and the `weights` of
    `RolloutFunc`.

    It publishes each new version as a folder in `root`, which every instance can read. The
    scheduler's policy decides when and how an instance pauses, loads and resumes, so `pause` and
    `resume` do nothing.
    """

    def __init__(self, rollouts: BlockingRollouts, root: str | Path) -> None:
        self._rollouts = rollouts
        self._checkpoints = Checkpoints(root)

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write `(name, tensor)` pairs and publish them. Raises OSError, CallerError."""
        state = self._rollouts.state()
        version = state["version"] + 1
        folder = self._checkpoints.write(version, iterator)
        self._rollouts.publish_weights(version, Reload(str(folder)))
        self._checkpoints.delete_before(state["fleet_version"])

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
