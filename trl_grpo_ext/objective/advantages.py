"""
Group relative advantages: outcome supervision (arXiv:2402.03300, 4.1.2) and process supervision (4.1.3).

The paper says neither which standard deviation it divides by nor what it adds to it: `std_correction=1` and
`eps=1e-4` are TRL's choices. It says nothing of groups that cannot be compared either: a group in which fewer than two
completions have a reward, or whose rewards are all the same, has advantages of exactly 0.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from .groups import GroupStatistics, group_statistics, masked_std, to_groups


SCALES = ("group", "batch", "none")


def outcome_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    *,
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
        scale (`str`, *optional*, defaults to `"group"`):
            What to divide by: the standard deviation of the `"group"`, of the whole `"batch"` (Lite PPO,
            arXiv:2508.08221), or `"none"` (Dr. GRPO, arXiv:2503.20783).
        std_correction (`int`, *optional*, defaults to `1`):
            `1` for the sample's standard deviation, `0` for the population's.
        eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            A group whose rewards differ by no more than this has advantages of exactly 0.

    Returns:
        `torch.Tensor` of shape (B,) in float32. A completion without reward has advantage 0.
    """
    return normalized_rewards(
        rewards,
        num_generations,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
        tolerance=tolerance,
    )


def process_advantages(
    step_rewards: Sequence[Sequence[float | None]],
    step_ends: Sequence[Sequence[int]],
    num_generations: int,
    length: int,
    *,
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
        scale, std_correction, eps, tolerance:
            As for [`outcome_advantages`].

    Returns:
        `torch.Tensor` of shape (B, T) in float32. Tokens after the last step end have advantage 0, and so has a
        completion without any step reward.

    Raises:
        `ValueError`: if a completion's rewards and ends differ in number, or its ends do not ascend from 0 to less
            than `length`.
    """
    for index, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        check_step_ends(index, rewards, ends, length)
    normalized = normalized_rewards(
        pad_step_rewards(step_rewards),
        num_generations,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
        tolerance=tolerance,
    )
    return spread_over_tokens(sum_to_go(normalized), pad_step_ends(step_ends, length), length)


def normalized_rewards(
    rewards: torch.Tensor,
    num_generations: int,
    *,
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
        num_generations, scale, std_correction, eps, tolerance:
            As for [`outcome_advantages`].

    Returns:
        `torch.Tensor` of the shape of `rewards` in float32, 0 where there is no reward and in all-same groups.
    """
    groups = to_groups(rewards, num_generations)
    statistics = group_statistics(groups, std_correction=std_correction, tolerance=tolerance)
    scores = groups.flatten(1)
    centered = scores - statistics.mean
    divisor = scale_divisor(scores, statistics, scale, std_correction, eps)
    silent = statistics.all_same | scores.isnan()
    return (centered / divisor).where(~silent, 0).reshape(rewards.shape)


def weighted_sum(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over reward functions, (..., F) to (...), of the rewards there are; NaN where there is none."""
    rewards = (rewards_per_func * weights.to(rewards_per_func.device)).nansum(-1)
    return rewards.masked_fill(rewards_per_func.isnan().all(-1), torch.nan)


def scale_divisor(
    scores: torch.Tensor, statistics: GroupStatistics, scale: str, std_correction: int, eps: float
) -> torch.Tensor:
    """What centered scores of shape (P, N) are divided by, broadcastable to them."""
    match scale:
        case "group":
            return statistics.std + eps
        case "batch":
            flat = scores.flatten()
            return masked_std(flat, ~flat.isnan(), std_correction) + eps
        case "none":
            return torch.ones_like(statistics.std)
    raise ValueError(f"`scale` is {scale!r}, but must be one of {', '.join(map(repr, SCALES))}.")


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


def sum_to_go(step_values: torch.Tensor) -> torch.Tensor:
    """Sum of each step's value and all later ones, (B, K) to (B, K)."""
    return step_values.flip(-1).cumsum(-1).flip(-1)


def spread_over_tokens(step_values: torch.Tensor, step_ends: torch.Tensor, length: int) -> torch.Tensor:
    """
    Give every token up to and including a step's last token that step's value.

    Args:
        step_values (`torch.Tensor` of shape (B, K)):
            One value a step.
        step_ends (`torch.Tensor` of shape (B, K)):
            Index of each step's last token, ascending in a row, padded with `length`.
        length (`int`):
            Number of tokens, T.

    Returns:
        `torch.Tensor` of shape (B, T), 0 after the last step end.
    """
    tokens = torch.arange(length, device=step_ends.device).expand(step_ends.shape[0], -1).contiguous()
    step_of_token = torch.searchsorted(step_ends, tokens)  # the first step that ends at the token or after it
    is_step = step_ends < length
    values = torch.nn.functional.pad(step_values.where(is_step, 0), (0, 1))
    return values.gather(1, step_of_token)


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
