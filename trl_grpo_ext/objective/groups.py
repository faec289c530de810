"""
Groups: the G completions sampled for one prompt, and statistics over their scores.

The one home of the step from a flat batch (B,) to groups (P, G), of masked statistics and of the all-same test. Rows
of one group are adjacent, as TRL's sampler lays them; the same prompt twice in a batch makes two groups.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupStatistics:
    """
    Statistics of the scores of each group, over scored entries only.

    Args:
        mean (`torch.Tensor` of shape (P, 1)):
            Mean score, 0 in a group without scores.
        std (`torch.Tensor` of shape (P, 1)):
            Standard deviation, 0 in a group with too few scores for its correction.
        all_same (`torch.Tensor` of shape (P, 1)):
            Whether the group says nothing about which of its members is better: fewer than two members are scored, or
            all scores lie within the tolerance.
    """

    mean: torch.Tensor
    std: torch.Tensor
    all_same: torch.Tensor


def to_groups(scores: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Lay the rows of a flat batch out by group.

    Args:
        scores (`torch.Tensor` of shape (B,) or (B, K)):
            One score, or K step scores, a completion.
        num_generations (`int`):
            Number of completions a prompt, G.

    Returns:
        `torch.Tensor` of shape (P, G, K) in float32, with K = 1 for scores of shape (B,).

    Raises:
        `ValueError`: if B is 0 or not a multiple of G.
    """
    if num_generations < 1 or len(scores) == 0 or len(scores) % num_generations != 0:
        raise ValueError(
            f"`num_generations` is {num_generations}, but must divide the number of completions, {len(scores)}."
        )
    return scores.float().reshape(-1, num_generations, scores[0].numel() if scores.dim() > 1 else 1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension where `mask` holds; 0 where it holds nowhere."""
    return values.where(mask, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_std(values: torch.Tensor, mask: torch.Tensor, correction: int) -> torch.Tensor:
    """Standard deviation over the last dimension where `mask` holds; 0 where there are too few values for it."""
    squares = (values - masked_mean(values, mask)).square().where(mask, 0).sum(-1, keepdim=True)
    return (squares / (mask.sum(-1, keepdim=True) - correction).clamp(min=1)).sqrt()


def all_within(scores: torch.Tensor, tolerance: float) -> torch.Tensor:
    """
    Whether the scores along the last dimension, NaN where there is none, differ by no more than the tolerance.

    A float32 standard deviation of equal scores is hardly ever 0 (6e-8 for 64 times 0.7), so it cannot tell.
    """
    scored = ~scores.isnan()
    largest = scores.where(scored, -torch.inf).amax(-1, keepdim=True)
    smallest = scores.where(scored, torch.inf).amin(-1, keepdim=True)
    return largest - smallest <= tolerance


def group_statistics(groups: torch.Tensor, *, std_correction: int = 1, tolerance: float = 1e-6) -> GroupStatistics:
    """
    Statistics over all scores of each group, flat (arXiv:2402.03300, 4.1.2 and 4.1.3).

    Args:
        groups (`torch.Tensor` of shape (P, G, K)):
            Scores, NaN where there is none.
        std_correction (`int`, *optional*, defaults to `1`):
            `0` for the population's standard deviation, `1` for the sample's.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            Largest difference between scores that count as equal.

    Returns:
        [`GroupStatistics`].
    """
    scored_members = (~groups.isnan()).any(-1).sum(-1, keepdim=True)
    scores = groups.flatten(1)
    scored = ~scores.isnan()
    return GroupStatistics(
        mean=masked_mean(scores, scored),
        std=masked_std(scores, scored, std_correction),
        all_same=(scored_members < 2) | all_within(scores, tolerance),
    )
