from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_config_model_id, nanstd

from ..model_card import describe_training
from ..objective.advantages import outcome_advantages, pad_step_ends, step_advantages
from ..objective.filtering import consistent_completions
from ..objective.groups import group_statistics, to_groups
from ..objective.loss import live_group_scale
from ..objective.step_credit import spread_over_tokens
from ..prm.process_reward_model import ProcessRewardModel
from ..steps import SeparatorSplitter, Steps, TextSplitter, filler_share
from .dynamic_sampling import DynamicSampling
from .grpo_config import GRPOExtConfig
from .loss_options import own_tokens
from .pushing import PushesSafely
from .step_scoring import StepRewardFunc, StepScorer, as_list


class GRPOExtTrainer(PushesSafely, DynamicSampling):
    r"""
    [`~trl.GRPOTrainer`] with the process supervision of DeepSeekMath (arXiv:2402.03300, 4.1.3) and every variant of
    its objective that [`GRPOExtConfig`] names.

    A drop-in replacement: with [`GRPOExtConfig`]'s own parameters at their defaults, losses, gradients and metrics are
    those of [`~trl.GRPOTrainer`] for the same seed, to rounding (in bf16, to bf16's), where `pool_generation_batches`
    has nothing to pool. (A second call of `train` samples anew, where TRL would go on with what is left of the
    completions of the first.)

    Example:

    ```python
    from trl.rewards import accuracy_reward
    from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer


    def right_sums(steps, **kwargs):
        return [[check_sum(step) for step in completion] for completion in steps]  # 1.0, 0.0, or None: no sum


    trainer = GRPOExtTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=GRPOExtConfig(supervision="process"),
        train_dataset=dataset,
        step_reward_funcs=right_sums,
    )
    trainer.train()
    ```

    Args:
        model, reward_funcs, args, *trl_args, **trl_kwargs:
            Those of [`~trl.GRPOTrainer`]. With process supervision `reward_funcs` are logged but do not train (unless
            `outcome_weight` is above 0), and may be left out; the mean step reward is then logged in their place.
        step_reward_funcs (`Callable`, `str`, [`~transformers.PreTrainedModel`], or a list of these, *optional*):
            Functions that score reasoning steps, or process reward models as [`ProcessRewardModel`] takes them, by Hub
            id, folder or loaded. Functions are called as
            `f(prompts, completions, steps, completion_ids, **columns)` with the completions of this process, where
            `steps[i]` is the list of step texts of completion i. Each returns one list a completion with one float a
            step, or `None` for a step it cannot score. They also receive `step_ends` (the indices of the steps' last
            tokens) and, like reward functions, `trainer_state`, `log_extra` and `log_metric`. The scores of several
            functions are summed, weighted, leaving out `None`.
        step_reward_weights (`list[float]`, *optional*):
            Weight of each function, 1 by default.
        step_splitter (`Callable[[str], list[str]]`, *optional*):
            Splits a completion's text into steps that, joined, give it back. Replaces `step_separator`.

    Raises:
        `ValueError`: if process supervision or the process filter lacks step reward functions, or they are given
            without either; if the filter or `outcome_weight` lacks `reward_funcs`; if weights and functions differ in
            number; if the tokenizer cannot write the separator; in the first batch, if the
            separator occurs in no completion, or a function returns another number of scores than there are steps, or
            none at all.
        `TypeError`: if a step reward function is no callable, an asynchronous one, or returns no lists of numbers.
    """

    _tag_names = ["trl", "grpo", "trl_grpo_ext"]

    args: GRPOExtConfig
    supervision = "outcome"
    step_scorer: StepScorer | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: GRPOExtConfig | None = None,
        *trl_args,
        step_reward_funcs: StepRewardFunc | str | torch.nn.Module | list | None = None,
        step_reward_weights: list[float] | None = None,
        step_splitter: TextSplitter | None = None,
        **trl_kwargs,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOExtConfig(f"{name.split('/')[-1]}-GRPO")
        self.supervision = getattr(args, "supervision", "outcome")  # a plain GRPOConfig is welcome, too
        if getattr(args, "scores_steps", False):
            splitter = step_splitter or SeparatorSplitter(args.step_separator, args.step_separator_is_regex)
            scorers = [as_step_reward_func(func) for func in as_list(step_reward_funcs) if func is not None]
            self.step_scorer = StepScorer(scorers, step_reward_weights, splitter)
            if not reward_funcs:
                check_no_outcome_is_needed(args)
                reward_funcs = self.mean_step_reward
        elif step_reward_funcs or step_reward_weights or step_splitter:
            raise ValueError(
                f"`supervision` is {self.supervision!r}, which uses no `step_reward_funcs`, `step_reward_weights` or "
                "`step_splitter`; set supervision='process' or `process_filter_keep`, or leave them out."
            )
        super().__init__(model, reward_funcs, args, *trl_args, **trl_kwargs)
        if self.step_scorer is not None and step_splitter is None:
            check_separator(args, self.text_tokenizer)
        for func in self.step_scorer.funcs if self.step_scorer is not None else []:
            if isinstance(func, ProcessRewardModel):
                func.move_to(self.accelerator.device)
        self._separator_is_proven = step_splitter is not None
        self._scores_are_proven = False

    def before_rewards(self, inputs, prompts, completions, completion_ids) -> None:
        if self.step_scorer is None:
            return
        scored = self.step_scorer(
            self.text_tokenizer, prompts, completions, completion_ids, self.reward_kwargs(inputs)
        )
        self._steps = scored.steps
        self._log_step_counts(scored.steps)
        # Completions of one group may lie on several processes, with another largest number of steps on each.
        local = scored.rewards_per_func.to(self.accelerator.device)
        rewards_per_func = gather(self.accelerator.pad_across_processes(local, dim=1, pad_index=float("nan")))
        self._step_rewards = self.step_scorer.combine(rewards_per_func)
        self._check_first_rewards()
        self._log_step_rewards(dict(zip(self.step_scorer.names, rewards_per_func.unbind(-1), strict=True)))

    def batch_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        advantages = super().batch_advantages(batch)
        if not isinstance(self.args, GRPOExtConfig):
            return advantages
        if self.supervision == "process":
            advantages = self._process_advantages(batch)
        elif self.args.changes_outcome_advantages:
            advantages = self._outcome_advantages(len(advantages))
        return advantages

    def pool_batches(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        batches = super().pool_batches(batches)
        if not getattr(self.args, "live_group_denominator", False):
            return batches
        scale = self._live_group_scale(batches)
        return [{**batch, "advantages": batch["advantages"] * scale} for batch in batches]

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        model_name = model_name or (self.args.hub_model_id or Path(self.args.output_dir).name).split("/")[-1]
        # The Hub refuses a card whose header names a data set by a path.
        hub_dataset = dataset_name if dataset_name and not Path(dataset_name).exists() else None
        super().create_model_card(model_name=model_name, dataset_name=hub_dataset, tags=tags)
        if self.is_world_process_zero():
            description = getattr(getattr(self.train_dataset, "info", None), "description", None)
            describe_training(
                Path(self.args.output_dir, "README.md"),
                base_model=public_name(get_config_model_id(self.model.config)) or "a model made in the script",
                data=public_name(dataset_name) or description or "a data set made in the script",
                args=self.args,
            )

    def mean_step_reward(self, completions: list, **kwargs) -> list[float | None]:
        """The reward to log where there is no reward function: the mean of a completion's step rewards."""
        means = self._step_rewards[self.local_rows(len(completions))].nanmean(-1).tolist()
        return [None if mean != mean else mean for mean in means]

    def _process_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        num_rows, length = batch["completion_mask"].shape
        every_value = step_advantages(
            self._step_rewards,
            self.generations_per_prompt,
            credit=self.args.step_credit,
            **self._normalization_options,
        )
        self._log_count_correlation(every_value[:, 0])
        step_values = every_value[self.local_rows(num_rows)]
        step_ends = pad_step_ends([steps.ends for steps in self._steps], length, num_steps=step_values.shape[1])
        advantages = spread_over_tokens(step_values, step_ends.to(step_values.device), length)
        if self.args.outcome_weight > 0:
            advantages = advantages + self.args.outcome_weight * self._outcome_advantages(num_rows).unsqueeze(-1)
        return advantages * own_tokens(batch)

    def _outcome_advantages(self, num_rows: int) -> torch.Tensor:
        rewards = self.weighted_rewards()
        rewards = rewards.masked_fill(~rewards.isfinite(), torch.nan)  # one infinite reward would be all there is
        if self.args.process_filter_keep is not None:
            process_scores = self._step_rewards.nanmean(-1)
            kept = consistent_completions(
                rewards,
                process_scores,
                self.generations_per_prompt,
                self.args.process_filter_keep,
                self.args.zero_advantage_tolerance,
            )
            self.log_metric("process_filter/kept_step_reward", process_scores[kept].nanmean().item())
            rewards = rewards.masked_fill(~kept, torch.nan)
        advantages = outcome_advantages(rewards, self.generations_per_prompt, **self._normalization_options)
        return advantages[self.local_rows(num_rows)]

    def _live_group_scale(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        moves = [gather((b["advantages"] != 0).reshape(len(b["advantages"]), -1).any(-1)) for b in batches]
        lengths = [gather(own_tokens(batch).sum(-1)) for batch in batches]
        group_moves = torch.cat(moves).view(-1, self.generations_per_prompt).any(-1)
        self.log_metric("frac_groups_live", group_moves.float().mean().item())
        is_live = group_moves.repeat_interleave(self.generations_per_prompt)
        return live_group_scale(is_live, torch.cat(lengths), self.loss_type)

    @property
    def _normalization_options(self) -> dict[str, Any]:
        return {
            "baseline": self.args.advantage_baseline,
            "scale": self.scale_rewards,
            "std_correction": self.args.std_correction,
            "eps": self.args.std_eps,
            "tolerance": self.args.zero_advantage_tolerance,
        }

    def _log_step_counts(self, steps: list[Steps]) -> None:
        device = self.accelerator.device
        self._step_counts = counts = gather(torch.tensor([len(s.ends) for s in steps], device=device))
        lengths = gather(torch.tensor([completion.ends[-1] + 1 for completion in steps], device=device))
        if self.mode == "train":
            self._check_first_batch(counts)
        self.log_metric("steps/mean_count", counts.float().mean().item())
        self.log_metric("steps/min_count", counts.min().item())
        self.log_metric("steps/max_count", counts.max().item())
        self.log_metric("steps/mean_length", (lengths.sum() / counts.sum()).item())
        filler = gather(torch.tensor([filler_share(completion.texts) for completion in steps], device=device))
        self.log_metric("steps/filler_share", filler.mean().item())

    def _log_count_correlation(self, first_values: torch.Tensor) -> None:
        """Whether completions of more steps are paid more: the correlation with the first step's advantage."""
        pairs = torch.stack([self._step_counts.float(), first_values])
        has_spread = pairs.std(dim=1).min() > 0 if len(first_values) > 1 else False
        correlation = torch.corrcoef(pairs)[0, 1].item() if has_spread else float("nan")
        self.log_metric("steps/count_advantage_correlation", correlation)

    def _check_first_batch(self, step_counts: torch.Tensor) -> None:
        if not self._separator_is_proven and step_counts.max() == 1:
            raise ValueError(
                f"`step_separator` is {self.args.step_separator!r}, but it divides none of the {len(step_counts)} "
                "completions of the first batch, so that each would be a single step; set it to what the model writes "
                "between steps, or pass `step_splitter`."
            )
        self._separator_is_proven = True

    def _check_first_rewards(self) -> None:
        if not self._scores_are_proven and self._step_rewards.isnan().all():
            raise ValueError(
                "`step_reward_funcs` scored none of the steps of the first batch, so that there is nothing to train "
                "on; return a number for the steps that can be scored."
            )
        self._scores_are_proven = True

    def _log_step_rewards(self, rewards_per_func: dict[str, torch.Tensor]) -> None:
        self.log_metric("step_reward", self._step_rewards.nanmean().item())
        self.log_metric("step_reward_std", nanstd(self._step_rewards.flatten()).item())
        for name, rewards in rewards_per_func.items():
            self.log_metric(f"step_rewards/{name}/mean", rewards.nanmean().item())
            self.log_metric(f"step_rewards/{name}/std", nanstd(rewards.flatten()).item())
        groups = to_groups(self._step_rewards, self.generations_per_prompt)
        all_same = group_statistics(groups, tolerance=self.args.zero_advantage_tolerance).all_same
        self.log_metric("step_rewards/frac_groups_all_same", all_same.float().mean().item())


def public_name(name_or_path: str | None) -> str | None:
    """A Hub id as it is, and of a local path only the last part."""
    return Path(name_or_path).name if name_or_path and Path(name_or_path).exists() else name_or_path


def as_step_reward_func(func: StepRewardFunc | str | Path | torch.nn.Module) -> StepRewardFunc:
    """A process reward model given by name or loaded, as a function; functions as they are."""
    if isinstance(func, (str, Path, torch.nn.Module)):
        return ProcessRewardModel(func)
    return func


def check_no_outcome_is_needed(args: GRPOExtConfig) -> None:
    for name, value in (("outcome_weight", args.outcome_weight), ("process_filter_keep", args.process_filter_keep)):
        if value:
            raise ValueError(
                f"`reward_funcs` is missing, but `{name}` is {value}, which needs outcome rewards; pass a reward "
                "function, or leave it out."
            )


def check_separator(args: GRPOExtConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` if the tokenizer cannot write the separator."""
    separator = args.step_separator
    if not args.step_separator_is_regex and separator not in tokenizer.decode(tokenizer.encode(separator)):
        raise ValueError(
            f"`step_separator` is {separator!r}, which the tokenizer cannot write, so that no completion would "
            "contain it; set it to what the model writes between steps, or pass `step_splitter`."
        )
