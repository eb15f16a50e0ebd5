"""GRPOTrainer's completions, made in groups by a scheduler."""

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

#: Seconds between two looks at whether what is waited for can still come.
LOOK_S = 1.0

_FILTERED = (
    "they were filtered, but this trainer waits for every prompt; start the scheduler without keep"
)


class RolloutFunc:
    """GRPOTrainer's `rollout_func` (TRL 1.16): prompts in, one completion for each.

    rollouts  of a scheduler whose `prompts_per_step` divides the number of different prompts that
              the trainer generates for at a time: its generation batch over `num_generations`
    weights   publishes the trainer's weights before the first completion of a step. Without it,
              TRL does (`use_vllm=True, vllm_mode="server"`, the gateway as `vllm_server_base_url`)
    tool      called between the turns of each completion, see `RolloutScheduler.submit`

    The trainer waits for the completions of these very prompts, so each is made under the weights
    of its step, whatever staleness the policy allows; one that runs ahead is for AsyncGRPOTrainer.
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
        """`prompts` of this process, each as often as it is to have completions, side by side.

        prompt_ids, completion_ids  token ids, one list for each of `prompts`
        logprobs                    of each completion's tokens, by the weights that made them
        env_mask                    with a tool: 1 for tokens of the model, 0 for the tool's
        reward                      where the scheduler has a reward function; TRL hands it on to
                                    its own, which may return it as it is

        Raises CallerError, on every process, where these cannot be made.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        self._publish(trainer)
        everyone = gather_object(prompts)
        answer: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            try:
                answer = [self._roll_out(everyone, trainer)]
            except Exception as error:  # the others wait for an answer
                answer = [error]
        broadcast_object_list(answer, from_process=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        begin = trainer.accelerator.process_index * len(prompts)
        return _columns(answer[0][begin : begin + len(prompts)], masks=self._tool is not None)

    def _publish(self, trainer: Any) -> None:
        """Once for each step; what gathers parameters does so on every process."""
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
        """A batch that is larger than what is submitted would never come."""
        batch = self._rollouts.state()["prompts_per_step"]
        if groups % batch:
            raise CallerError(
                f"the trainer generates for {groups} different prompts at a time, and a batch of "
                f"the scheduler has {batch}: start it with prompts_per_step={groups}"
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
        """A batch that lacks a group for ever does not come: the scheduler's state tells before."""
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
            raise CallerError("submissions are closed: the trainer needs a scheduler of its own")
        return batch


def _raise_failed(failed: Mapping[str, str], missing: set[str]) -> None:
    for uid in missing & failed.keys():
        raise CallerError(f"completions could not be made: {failed[uid]}")


def _index(sample: Sample) -> int:
    return sample.index


def _every(samples: int, prompts: Sequence[Any]) -> list[Any]:
    """The different ones of prompts that stand so many times side by side."""
    different = list(prompts[::samples])
    if len(prompts) % samples or any(
        prompt != different[place // samples] for place, prompt in enumerate(prompts)
    ):
        raise CallerError(
            f"each prompt should come {samples} times side by side, as GRPOTrainer's sampler has it"
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
    """By the names of the model's checkpoint; one that is tied to another comes once."""
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise CallerError(
            "adapters are not merged here: let TRL send the weights (use_vllm), or train all"
        )
    whole = trainer.accelerator.get_state_dict(trainer.model)
    first = {tensor.data_ptr(): name for name, tensor in reversed(whole.items())}
    return {name: tensor for name, tensor in whole.items() if first[tensor.data_ptr()] == name}
