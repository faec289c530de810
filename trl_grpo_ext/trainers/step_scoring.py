from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_callable_name, is_async_callable

from ..objective.advantages import pad_step_rewards
from ..steps import Steps, TextSplitter, cut_into_steps


StepRewardFunc = Callable[..., list[list[float | None]]]


@dataclass(frozen=True)
class ScoredSteps:
    """
    The steps of B completions and their rewards.

    Args:
        steps (`list[Steps]` of length B):
            The steps of each completion.
        rewards_per_func (`torch.Tensor` of shape (B, K, F)):
            Rewards of up to K steps by each of F functions, NaN where there is none.
    """

    steps: list[Steps]
    rewards_per_func: torch.Tensor


class StepScorer:
    """
    Cuts completions into steps and has each step reward function score them.

    Args:
        funcs (`Sequence[Callable]`):
            Step reward functions.
        weights (`Sequence[float]`, *optional*):
            Weight of each function, 1 by default.
        splitter (`Callable[[str], list[str]]`):
            Splits a completion's text into steps.

    Raises:
        `TypeError`: if a function is no callable, or an asynchronous one.
        `ValueError`: if there is no function, or weights and functions differ in number.
    """

    def __init__(self, funcs: Sequence[StepRewardFunc], weights: Sequence[float] | None, splitter: TextSplitter):
        if not funcs:
            raise ValueError(
                "`step_reward_funcs` is missing, but supervision='process' needs at least one; pass a function that "
                "scores steps, or use supervision='outcome'."
            )
        for func in funcs:
            check_step_reward_func(func)
        if weights is not None and len(weights) != len(funcs):
            raise ValueError(
                f"`step_reward_weights` has {len(weights)} entries for {len(funcs)} step reward functions; give one "
                "weight a function."
            )
        self.funcs = list(funcs)
        self.names = unique_names([get_callable_name(func) for func in funcs])
        self.weights = torch.tensor(weights or [1.0] * len(funcs), dtype=torch.float32)
        self.splitter = splitter

    def __call__(
        self, tokenizer: PreTrainedTokenizerBase, prompts: list, completions: list, completion_ids: list, **columns
    ) -> ScoredSteps:
        """
        Score the steps of completions.

        Raises:
            `ValueError`: if a function returns another number of scores than there are steps.
        """
        steps = [cut_into_steps(ids, tokenizer, self.splitter) for ids in completion_ids]
        arguments = {
            "prompts": prompts,
            "completions": completions,
            "steps": [completion.texts for completion in steps],
            "completion_ids": completion_ids,
            **columns,
        }
        rewards = []
        for name, func in zip(self.names, self.funcs, strict=True):
            scores = func(**arguments)
            check_scores(name, scores, steps)
            rewards.append(pad_step_rewards(scores))
        return ScoredSteps(steps, torch.stack(rewards, dim=-1))

    def combine(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Weighted sum over functions, (B, K, F) to (B, K): NaN where no function scored."""
        rewards = (rewards_per_func * self.weights.to(rewards_per_func.device)).nansum(-1)
        return rewards.masked_fill(rewards_per_func.isnan().all(-1), torch.nan)


def unique_names(names: list[str]) -> list[str]:
    """The names, numbered from the second time on that one occurs, so that each function has metrics of its own."""
    return [name if name not in names[:i] else f"{name}_{names[:i].count(name) + 1}" for i, name in enumerate(names)]


def check_step_reward_func(func: StepRewardFunc) -> None:
    if not callable(func):
        raise TypeError(
            f"`step_reward_funcs` contains {func!r}, which is no function; pass callables that return one list of "
            "scores a completion."
        )
    if is_async_callable(func):
        raise TypeError(
            f"`step_reward_funcs` contains the asynchronous '{get_callable_name(func)}'; pass a synchronous function, "
            "which may run an event loop of its own."
        )


def check_scores(name: str, scores: Sequence[Sequence[float | None]], steps: list[Steps]) -> None:
    if len(scores) != len(steps):
        raise ValueError(
            f"The step reward function '{name}' returned {len(scores)} lists of scores for {len(steps)} completions; "
            "it must return one list a completion."
        )
    for index, (row, completion) in enumerate(zip(scores, steps, strict=True)):
        if len(row) != len(completion.texts):
            raise ValueError(
                f"The step reward function '{name}' returned {len(row)} scores for completion {index}, which has "
                f"{len(completion.texts)} steps; it must return one score (or None) a step."
            )
