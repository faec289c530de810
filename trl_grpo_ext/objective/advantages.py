"""
Group relative advantages: outcome supervision (arXiv:2402.03300, 4.1.2) and process supervision (4.1.3).

The paper says neither which standard deviation it divides by nor what it adds to it: `std_correction=1` and
`eps=1e-4` are TRL's choices. It says nothing of groups that cannot be compared either: under a baseline taken from the
group, one in which fewer than two completions have a reward, or whose rewards are all the same, has advantages of
exactly 0.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..choices import unknown_choice
from .groups import GroupStatistics, all_within, group_statistics, masked_mean, masked_std, to_groups
from .step_credit import RETURN_CREDITS, credit_steps, first_from_here, spread_over_tokens, step_returns


SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out", "batch", "none")
GROUP_BASELINES = ("mean", "leave_one_out")


def outcome_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    *,
    baseline: str = "mean",
    scale: str = "group",
    std_correction: int = 1,
    eps: float = 1e-4,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    r"""
    Outcome supervision: \( \hat A_i = (r_i - \mathrm{mean}(r)) / \mathrm{std}(r) \) (4.1.2).

    Args:
        rewards (`torch.Tensor` of shape (B,)):
            One reward a completion, NaN where there is none; the G completions of a prompt are adjacent.
        num_generations (`int`):
            Number of completions a prompt, G.
        baseline (`str`, *optional*, defaults to `"mean"`):
            What to subtract: the `"mean"` of the group, of its other members (`"leave_one_out"`, RLOO,
            arXiv:2402.14740), of the whole `"batch"` (REINFORCE++, arXiv:2501.03262), or `"none"`.
        scale (`str`, *optional*, defaults to `"group"`):
            What to divide by: the standard deviation of the raw rewards of the `"group"`, of the whole `"batch"` (Lite
            PPO, arXiv:2508.08221), or `"none"` (Dr. GRPO, arXiv:2503.20783). Rewards that are all the same have no
            spread to divide by, and are not divided.
        std_correction (`int`, *optional*, defaults to `1`):
            `1` for the sample's standard deviation, `0` for the population's.
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            Rewards that differ by no more than this count as the same.

    Returns:
        `torch.Tensor` of shape (B,) in float32. A completion without reward has advantage 0.

    Raises:
        `ValueError`: if `baseline` or `scale` is unknown, or B is no multiple of `num_generations`.
    """
    normalized = normalized_rewards(
        rewards,
        num_generations,
        baseline=baseline,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
        tolerance=tolerance,
    )
    return normalized.masked_fill(rewards.isnan(), 0)


def process_advantages(
    step_rewards: Sequence[Sequence[float | None]],
    step_ends: Sequence[Sequence[int]],
    num_generations: int,
    length: int,
    *,
    credit: str = "sum_to_go",
    baseline: str = "mean",
    scale: str = "group",
    std_correction: int = 1,
    eps: float = 1e-4,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    r"""
    Process supervision: \( \hat A_{i,t} = \sum_{\mathrm{index}(j) \ge t} \tilde r_i^{\mathrm{index}(j)} \) (4.1.3).

    The rewards of all steps of all completions of a group are normalized together; a token's advantage is the sum of
    the normalized rewards of its own step and of the steps after it. With one step a completion this is outcome
    supervision.

    Args:
        step_rewards (`Sequence[Sequence[float | None]]` of length B):
            One reward a step, `None` or NaN where there is none; the G completions of a prompt are adjacent.
        step_ends (`Sequence[Sequence[int]]` of length B):
            `step_ends[i][j]` is the index, in completion tokens, of the last token of step j of completion i.
        num_generations (`int`):
            Number of completions a prompt, G.
        length (`int`):
            Number of completion tokens in the result, T.
        credit (`str`, *optional*, defaults to `"sum_to_go"`):
            How step rewards become the advantages of steps, see [`~trl_grpo_ext.objective.step_credit`].
        baseline, scale, std_correction, eps, tolerance:
            As for [`outcome_advantages`], with means and standard deviations over step rewards. `"leave_one_out"`
            subtracts the mean over the steps of the other completions.

    Returns:
        `torch.Tensor` of shape (B, T) in float32. Tokens after the last step end have advantage 0, and so has a
        completion without any step reward.

    Raises:
        `ValueError`: if `credit`, `baseline` or `scale` is unknown, a completion's rewards and ends differ in number,
            or its ends do not ascend from 0 to less than `length`.
    """
    for index, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        check_step_ends(index, rewards, ends, length)
    step_values = step_advantages(
        pad_step_rewards(step_rewards),
        num_generations,
        credit=credit,
        baseline=baseline,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
        tolerance=tolerance,
    )
    return spread_over_tokens(step_values, pad_step_ends(step_ends, length), length)


def step_advantages(
    step_rewards: torch.Tensor, num_generations: int, *, credit: str = "sum_to_go", **normalization
) -> torch.Tensor:
    """
    Advantages of steps, before they are spread over tokens.

    Args:
        step_rewards (`torch.Tensor` of shape (B, K)):
            Step rewards, NaN where there is none; the G completions of a prompt are adjacent.
        num_generations (`int`):
            Number of completions a prompt, G.
        credit, **normalization:
            As for [`process_advantages`].

    Returns:
        `torch.Tensor` of shape (B, K) in float32, without NaN.
    """
    if credit not in RETURN_CREDITS:
        return credit_steps(normalized_rewards(step_rewards, num_generations, **normalization), credit)
    groups = to_groups(step_rewards, num_generations)
    centered = (groups - group_statistics(groups).mean[..., None]).reshape(step_rewards.shape)
    returns = step_returns(step_rewards.float(), centered, credit)
    return first_from_here(normalized_rewards(returns, num_generations, **normalization))


def normalized_rewards(
    rewards: torch.Tensor,
    num_generations: int,
    *,
    baseline: str = "mean",
    scale: str = "group",
    std_correction: int = 1,
    eps: float = 1e-4,
    tolerance: float = 1e-6,
) -> torch.Tensor:
    """
    Center and scale rewards by the flat statistics of their group.

    Args:
        rewards (`torch.Tensor` of shape (B,) or (B, K)):
            One reward, or K step rewards, a completion; NaN where there is none.
        num_generations, baseline, scale, std_correction, eps, tolerance:
            As for [`outcome_advantages`].

    Returns:
        `torch.Tensor` of the shape of `rewards` in float32, NaN where there is no reward and 0 for the others of an
        all-same group.
    """
    groups = to_groups(rewards, num_generations)
    statistics = group_statistics(groups, std_correction=std_correction, tolerance=tolerance)
    batch_is_all_same = all_within(groups.flatten(), tolerance)
    centered = (groups - baseline_rewards(groups, statistics, baseline)).flatten(1)
    if baseline in GROUP_BASELINES:
        centered = centered.masked_fill(statistics.all_same & ~centered.isnan(), 0)
    elif baseline == "batch":
        centered = centered.masked_fill(batch_is_all_same & ~centered.isnan(), 0)
    match scale:
        case "group":
            centered = centered / (statistics.std + eps).masked_fill(statistics.all_same, 1)
        case "batch":
            scores = groups.flatten()
            std = masked_std(scores, ~scores.isnan(), std_correction)
            centered = centered / (std + eps).masked_fill(batch_is_all_same, 1)
        case "none":
            pass
        case _:
            raise unknown_choice("scale", scale, SCALES)
    return centered.reshape(rewards.shape)


def baseline_rewards(groups: torch.Tensor, statistics: GroupStatistics, baseline: str) -> torch.Tensor:
    """What to subtract from scores of shape (P, G, K), broadcastable to them."""
    match baseline:
        case "mean":
            return statistics.mean[..., None]
        case "leave_one_out":
            totals = groups.nansum(-1, keepdim=True)
            counts = (~groups.isnan()).sum(-1, keepdim=True)
            return (totals.sum(1, keepdim=True) - totals) / (counts.sum(1, keepdim=True) - counts).clamp(min=1)
        case "batch":
            return masked_mean(groups.flatten(), ~groups.flatten().isnan())
        case "none":
            return torch.zeros_like(statistics.mean[..., None])
    raise unknown_choice("baseline", baseline, BASELINES)


def weighted_sum(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over reward functions, (..., F) to (...), of the rewards there are; NaN where there is none."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(-1)
    return rewards.masked_fill(rewards_per_func.isnan().all(-1), torch.nan)


def check_step_ends(index: int, rewards: Sequence[float | None], ends: Sequence[int], length: int) -> None:
    if len(rewards) != len(ends):
        raise ValueError(
            f"`step_rewards` has {len(rewards)} entries for completion {index}, but `step_ends` has {len(ends)}; give "
            "one reward (or None) a step."
        )
    if any(first >= second for first, second in pairwise([-1, *ends, length])):
        raise ValueError(
            f"`step_ends` is {list(ends)} for completion {index}, but must ascend from 0 to less than `length`, "
            f"{length}."
        )


def pad_step_rewards(step_rewards: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """Step rewards as a tensor of shape (B, K), NaN where a step has no reward or a completion no such step."""
    nan = float("nan")
    num_steps = max(map(len, step_rewards), default=0) or 1
    rows = [[nan if reward is None else reward for reward in rewards] for rewards in step_rewards]
    return torch.tensor([row + [nan] * (num_steps - len(row)) for row in rows], dtype=torch.float32)


def pad_step_ends(step_ends: Sequence[Sequence[int]], length: int, num_steps: int | None = None) -> torch.Tensor:
    """Step ends as a tensor of shape (B, K), padded with `length`; K is the largest number of steps unless given."""
    num_steps = num_steps or max(map(len, step_ends), default=0) or 1
    return torch.tensor([[*ends, *[length] * (num_steps - len(ends))] for ends in step_ends])
