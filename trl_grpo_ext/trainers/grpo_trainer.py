from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather
from trl.trainer.utils import get_callable_name, is_async_callable

from ..objective.advantages import (
    normalized_rewards,
    outcome_advantages,
    pad_step_ends,
    pad_step_rewards,
    spread_over_tokens,
    sum_to_go,
)
from ..objective.groups import group_statistics, to_groups
from ..steps import SeparatorSplitter, Steps, TextSplitter, cut_into_steps
from .grpo_config import GRPOExtConfig
from .seams import GRPOSeams


StepRewardFunc = Callable[..., list[list[float | None]]]


class GRPOExtTrainer(GRPOSeams):
    r"""
    [`~trl.GRPOTrainer`] with the process supervision of DeepSeekMath (arXiv:2402.03300, 4.1.3).

    A drop-in replacement: with [`GRPOExtConfig`]'s own parameters at their defaults, losses, gradients and metrics are
    those of [`~trl.GRPOTrainer`] for the same seed.

    Example:

    ```python
    from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer


    def shows_work(steps, **kwargs):
        return [[float("=" in step) for step in completion] for completion in steps]


    trainer = GRPOExtTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        step_reward_funcs=shows_work,
        args=GRPOExtConfig(supervision="process", step_separator="\n"),
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        *args, **kwargs:
            Those of [`~trl.GRPOTrainer`]. With process supervision `reward_funcs` may be left out; the mean step reward
            is then logged as the reward.
        step_reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Functions that score reasoning steps, called as
            `f(prompts, completions, steps, completion_ids, **columns)` with the local completions, where `steps[i]` is
            the list of step texts of completion i. Each returns one list a completion with one float a step, or `None`
            for a step it cannot score. Like reward functions they also receive `trainer_state`, `log_extra` and
            `log_metric`. Scores of several functions are summed, weighted, leaving out `None`.
        step_reward_weights (`list[float]`, *optional*):
            Weight of each function, 1 by default.
        step_splitter (`Callable[[str], list[str]]`, *optional*):
            Splits a completion's text into steps that joined give it back. Replaces `step_separator`.

    Raises:
        `ValueError`: if process supervision lacks step reward functions, or they are given without it; if weights and
            functions differ in number; if the tokenizer cannot write the separator; during the first batch, if the
            separator occurs in no completion or a function returns another number of scores than there are steps.
        `TypeError`: if a step reward function is no callable, or an asynchronous one.
    """

    _tag_names = ["trl", "grpo", "trl_grpo_ext"]

    supervision = "outcome"

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: GRPOExtConfig | None = None,
        *trl_args,
        step_reward_funcs: StepRewardFunc | list[StepRewardFunc] | None = None,
        step_reward_weights: list[float] | None = None,
        step_splitter: TextSplitter | None = None,
        **trl_kwargs,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOExtConfig(f"{name.split('/')[-1]}-GRPO")
        self.supervision = getattr(args, "supervision", "outcome")
        self.step_reward_funcs = as_list(step_reward_funcs)
        self._check_step_arguments(step_reward_weights, step_splitter)
        self.step_reward_weights = torch.tensor(step_reward_weights or [1.0] * len(self.step_reward_funcs))
        if self.supervision == "process" and not reward_funcs and "environment_factory" not in trl_kwargs:
            reward_funcs = self.mean_step_reward
        super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)
        if self.supervision == "process":
            self.step_splitter = step_splitter or self._separator_splitter()
            self._separator_was_seen = step_splitter is not None
        self._steps: list[Steps] = []

    def before_rewards(self, inputs, prompts, completions, completion_ids) -> None:
        if self.supervision != "process":
            return
        self._steps = [cut_into_steps(ids, self.text_tokenizer, self.step_splitter) for ids in completion_ids]
        texts = [steps.texts for steps in self._steps]
        scores = [
            self._scores(func, prompts=prompts, completions=completions, steps=texts, completion_ids=completion_ids,
                         **self.reward_kwargs(inputs))
            for func in self.step_reward_funcs
        ]
        self._log_step_counts()
        # (processes * B, K, functions), K being the largest number of steps on any process
        self._step_rewards_per_func = torch.stack([self._gather_steps(score) for score in scores], dim=-1)
        weighted = self._step_rewards_per_func * self.step_reward_weights.to(self.accelerator.device)
        self._step_rewards = weighted.nansum(-1).masked_fill(weighted.isnan().all(-1), torch.nan)

    def batch_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        if self.supervision == "process":
            self._log_step_rewards()
            return self._process_advantages(batch)
        if getattr(self.args, "changes_outcome_advantages", False):
            advantages = outcome_advantages(
                self.weighted_rewards(), self.generations_per_prompt, **self._normalization_options
            )
            return advantages[self._local_rows(len(batch["advantages"]))]
        return super().batch_advantages(batch)

    def mean_step_reward(self, completions: list, **kwargs) -> list[float | None]:
        """The reward to log where there is no reward function: the mean of a completion's step rewards."""
        means = self._step_rewards[self._local_rows(len(completions))].nanmean(-1)
        return [None if mean != mean else mean for mean in means.tolist()]

    def _process_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        completion_mask = batch["completion_mask"]
        num_rows, length = completion_mask.shape
        normalized = normalized_rewards(
            self._step_rewards, self.generations_per_prompt, **self._normalization_options
        )[self._local_rows(num_rows)]
        step_ends = pad_step_ends([steps.ends for steps in self._steps], length).to(normalized.device)
        step_values = sum_to_go(normalized)[:, : step_ends.shape[1]].contiguous()
        mask = completion_mask * batch.get("tool_mask", 1)
        return spread_over_tokens(step_values, step_ends, length) * mask

    @property
    def _normalization_options(self) -> dict[str, Any]:
        return {
            "scale": self.scale_rewards,
            "std_correction": self.args.std_correction,
            "eps": self.args.std_eps,
            "tolerance": self.args.zero_advantage_tolerance,
        }

    def _scores(self, func: StepRewardFunc, **kwargs) -> list[list[float | None]]:
        scores = func(**kwargs)
        name = get_callable_name(func)
        if len(scores) != len(self._steps):
            raise ValueError(
                f"The step reward function '{name}' returned {len(scores)} lists of scores for {len(self._steps)} "
                "completions; it must return one list a completion."
            )
        for index, (row, steps) in enumerate(zip(scores, self._steps, strict=True)):
            if len(row) != len(steps.texts):
                raise ValueError(
                    f"The step reward function '{name}' returned {len(row)} scores for completion {index}, which has "
                    f"{len(steps.texts)} steps; it must return one score (or None) a step."
                )
        return scores

    def _gather_steps(self, scores: Sequence[Sequence[float | None]]) -> torch.Tensor:
        """Step rewards of all processes, (processes * B, K), NaN where there is none."""
        local = pad_step_rewards(scores).to(self.accelerator.device)
        return gather(self.accelerator.pad_across_processes(local, dim=1, pad_index=float("nan")))

    def _local_rows(self, num_rows: int) -> slice:
        start = self.accelerator.process_index * num_rows
        return slice(start, start + num_rows)

    def _log_step_counts(self) -> None:
        counts = gather(torch.tensor([len(steps.ends) for steps in self._steps], device=self.accelerator.device))
        lengths = gather(torch.tensor([steps.ends[-1] + 1 for steps in self._steps], device=self.accelerator.device))
        if self.mode == "train" and not self._separator_was_seen:
            if counts.max() == 1:
                raise ValueError(
                    f"`step_separator` is {self.args.step_separator!r}, but it occurs in none of the {len(counts)} "
                    "completions of the first batch, so that each would be a single step; set it to what the model "
                    "writes between steps, or pass `step_splitter`."
                )
            self._separator_was_seen = True
        self.log_metric("steps/mean_count", counts.float().mean().item())
        self.log_metric("steps/min_count", counts.min().item())
        self.log_metric("steps/max_count", counts.max().item())
        self.log_metric("steps/mean_length", (lengths.sum() / counts.sum()).item())

    def _log_step_rewards(self) -> None:
        for index, func in enumerate(self.step_reward_funcs):
            self.log_reward_statistics(
                f"step_rewards/{get_callable_name(func)}", self._step_rewards_per_func[..., index]
            )
        self.log_metric("step_reward", self._step_rewards.nanmean().item())
        self.log_metric("step_reward_std", nanstd(self._step_rewards.flatten()).item())
        groups = to_groups(self._step_rewards, self.generations_per_prompt)
        all_same = group_statistics(groups, tolerance=self.args.zero_advantage_tolerance).all_same
        self.log_metric("step_rewards/frac_groups_all_same", all_same.float().mean().item())

    def _separator_splitter(self) -> SeparatorSplitter:
        separator = self.args.step_separator
        splitter = SeparatorSplitter(separator, self.args.step_separator_is_regex)
        tokenizer = self.text_tokenizer
        if not self.args.step_separator_is_regex and separator not in tokenizer.decode(tokenizer.encode(separator)):
            raise ValueError(
                f"`step_separator` is {separator!r}, which the tokenizer cannot write, so that no completion would "
                "contain it; set it to what the model writes between steps, or pass `step_splitter`."
            )
        return splitter

    def _check_step_arguments(self, weights: list[float] | None, splitter: TextSplitter | None) -> None:
        funcs = self.step_reward_funcs
        if self.supervision == "process" and not funcs:
            raise ValueError(
                "`step_reward_funcs` is missing, but supervision='process' needs at least one; pass a function that "
                "scores steps, or use supervision='outcome'."
            )
        if self.supervision != "process" and (funcs or weights or splitter):
            raise ValueError(
                f"`supervision` is {self.supervision!r}, which uses no `step_reward_funcs`, `step_reward_weights` or "
                "`step_splitter`; set supervision='process', or leave them out."
            )
        for func in funcs:
            if not callable(func):
                raise TypeError(
                    f"`step_reward_funcs` contains {func!r}, which is no function; pass callables that return one list "
                    "of scores a completion."
                )
            if is_async_callable(func):
                raise TypeError(
                    f"`step_reward_funcs` contains the asynchronous '{get_callable_name(func)}'; pass a synchronous "
                    "function, which may run its own event loop."
                )
        if weights is not None and len(weights) != len(funcs):
            raise ValueError(
                f"`step_reward_weights` has {len(weights)} entries for {len(funcs)} step reward functions; give one "
                "weight a function."
            )


def as_list(value) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
