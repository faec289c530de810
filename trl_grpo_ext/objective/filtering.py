"""Process scores as a filter instead of a reward: PROF (arXiv:2509.03403)."""

import torch

from .groups import all_within, masked_mean, to_groups


def consistent_completions(
    rewards: torch.Tensor, process_scores: torch.Tensor, num_generations: int, keep: float, tolerance: float = 1e-6
) -> torch.Tensor:
    """
    Choose the completions of each group whose process agrees with their outcome.

    Of the right completions (reward above the group's mean) those with the highest process scores are kept, of the
    others those with the lowest, and of both as equal a number as there are. An all-same group has no right ones.

    Args:
        rewards (`torch.Tensor` of shape (B,)):
            Outcome rewards, NaN where there is none; the G completions of a prompt are adjacent.
        process_scores (`torch.Tensor` of shape (B,)):
            Mean step reward of each completion, NaN where there is none: such a completion is kept last.
        num_generations (`int`):
            Number of completions a prompt, G.
        keep (`float`):
            Share of each group to keep; at least one right and one other completion stay where there are both.
        tolerance (`float`, *optional*, defaults to `1e-6`):
            A group whose rewards differ by no more than this is all-same.

    Returns:
        `torch.Tensor` of shape (B,), whether a completion is kept. Completions without reward are not.
    """
    outcomes = to_groups(rewards, num_generations).squeeze(-1)
    scored = ~outcomes.isnan()
    right = scored & (outcomes > masked_mean(outcomes, scored)) & ~all_within(outcomes, tolerance)
    agreement = to_groups(process_scores, num_generations).squeeze(-1)
    agreement = agreement.where(right, -agreement).nan_to_num(nan=torch.finfo(torch.float32).min)
    num_right, num_others = right.sum(-1, keepdim=True), (scored & ~right).sum(-1, keepdim=True)
    num_kept = max(2, round(keep * num_generations))
    keep_right = torch.maximum(num_right.clamp(max=num_kept // 2), (num_kept - num_others).clamp(min=0))
    keep_others = num_kept - torch.minimum(keep_right, num_right)
    kept = (right & (rank_among(agreement, right) < keep_right)) | (
        scored & ~right & (rank_among(agreement, scored & ~right) < keep_others)
    )
    return kept.flatten()


def rank_among(values: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Place of each member in descending order of its finite value, from 0, along the last dimension."""
    order = values.where(members, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)
