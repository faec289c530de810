import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import get_callable_name, is_async_callable

from ..objective.advantages import pad_step_rewards, weighted_sum
from ..steps import Steps, TextSplitter, cut_into_steps


LARGEST_SCORE = 1e18  # its square, which the standard deviation takes, is still a float32
StepRewardFunc = Callable[..., Any]


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
                "`step_reward_funcs` is missing, but supervision='process' or `process_filter_keep` needs at least "
                "one; pass a function that scores steps, or use supervision='outcome' alone."
            )
        for func in funcs:
            check_step_reward_func(func)
        if weights is not None and not isinstance(weights, (list, tuple)):
            raise TypeError(f"`step_reward_weights` is {weights!r}; give a list with one weight a function.")
        if weights is not None and len(weights) != len(funcs):
            raise ValueError(
                f"`step_reward_weights` has {len(weights)} entries for {len(funcs)} step reward functions; give one "
                "weight a function."
            )
        self.funcs = list(funcs)
        self.names = unique_names([get_callable_name(func) for func in funcs])
        self.weights = torch.tensor([1.0] * len(funcs) if weights is None else weights, dtype=torch.float32)
        self.splitter = splitter

    def __call__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list,
        completions: list,
        completion_ids: list,
        columns: dict[str, Any],
    ) -> ScoredSteps:
        """
        Score the steps of completions.

        Args:
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
                Tokenizer of the ids.
            prompts, completions, completion_ids (`list` of length B):
                What was asked and sampled.
            columns (`dict`):
                What the functions receive besides.

        Raises:
            `ValueError`: if a function returns another number of scores than there are steps, or a score that is no
                finite number; if a column has the name of an argument.
            `TypeError`: if a function returns something else than lists of numbers.
        """
        check_columns(columns)
        steps = [cut_into_steps(ids, tokenizer, self.splitter) for ids in completion_ids]
        rewards = []
        for name, func in zip(self.names, self.funcs, strict=True):
            # A reward function may score steps by another method
            scores = getattr(func, "score_steps", func)(
                prompts=prompts,
                completions=completions,
                steps=[list(completion.texts) for completion in steps],
                completion_ids=completion_ids,
                step_ends=[list(completion.ends) for completion in steps],
                **columns,
            )
            rewards.append(pad_step_rewards(checked_scores(name, scores, steps)))
        return ScoredSteps(steps, torch.stack(rewards, dim=-1))

    def combine(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Weighted sum over functions, (B, K, F) to (B, K): NaN where no function scored."""
        return weighted_sum(rewards_per_func, self.weights)


def as_list(functions: Any) -> list:
    """One function, several, or none, as a list."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, (list, tuple)) else [functions]


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


def check_columns(columns: dict[str, Any]) -> None:
    for name in ("prompts", "completions", "steps", "step_ends", "completion_ids"):
        if name in columns:
            raise ValueError(
                f"The data set has a column {name!r}, which is also what step reward functions receive of the "
                "completions; rename the column."
            )


def checked_scores(name: str, scores: Any, steps: list[Steps]) -> list[list[float | None]]:
    """The scores as lists of numbers, once it is sure that there is one, or None, for every step."""
    try:
        rows = [[to_score(score) for score in row] for row in scores]
    except TypeError as error:
        raise TypeError(
            f"The step reward function '{name}' returned {type(scores).__name__} that holds no lists of numbers "
            f"({error}); it must return one list a completion, with one number or None a step."
        ) from error
    if len(rows) != len(steps):
        raise ValueError(
            f"The step reward function '{name}' returned {len(rows)} lists of scores for {len(steps)} completions; it "
            "must return one list a completion."
        )
    for index, (row, completion) in enumerate(zip(rows, steps, strict=True)):
        if len(row) != len(completion.texts):
            raise ValueError(
                f"The step reward function '{name}' returned {len(row)} scores for completion {index}, which has "
                f"{len(completion.texts)} steps; it must return one score (or None) a step."
            )
        for score in row:
            if score is not None and abs(score) > LARGEST_SCORE:
                raise ValueError(
                    f"The step reward function '{name}' returned the score {score} for completion {index}; a score "
                    "must be a finite number, or None where there is none."
                )
    return rows


def to_score(score: Any) -> float | None:
    if isinstance(score, str):
        raise TypeError(f"{score!r} is text")
    return None if score is None or math.isnan(score) else float(score)
