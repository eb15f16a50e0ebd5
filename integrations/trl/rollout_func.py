"""Generates GRPOTrainer's completions in groups with a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from rollout_sched.client import Batch, BlockingRollouts, Sample, Tool
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.trl.checkpoint_transfer import CheckpointTransfer
from rollout_sched.integrations.trl.prompts import Prompts

if TYPE_CHECKING:
    import torch

#: Seconds between two checks whether the expected batch can still come.
LOOK_S = 1.0

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
        groups = self._prompts.of(different, samples, self._submitted)
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
            while not wait([coming], LOOK_S).done:
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
