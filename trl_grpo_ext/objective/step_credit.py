r"""
Credit: how the rewards of reasoning steps become the advantages of their tokens.

The paper normalizes rewards and sums over the following steps (arXiv:2402.03300, 4.1.3), so that a first token's
advantage is the number of steps times their mean normalized reward. The other forms are remedies against padding with
easy steps:

| `credit` | advantage of step j | source |
|---|---|---|
| `"sum_to_go"` | sum of its own and all later normalized rewards | 4.1.3 of the paper |
| `"mean_to_go"` | mean of its own and all later normalized rewards | |
| `"step"` | its own normalized reward | |
| `"min"` | normalized return: the smallest of its own and all later rewards | the hard form of PURE |
| `"softmin"` | normalized return: the sum to go of \( w_j r_j \), \( w = \mathrm{softmax}(-r / 0.1) \) over all steps | PURE, arXiv:2504.15275 |
| `"delta"` | normalized return: the sum to go of \( r_j - r_{j+1} \), that is \( r_j \); the last step's comes from the outcome | Gao et al., arXiv:2410.15115 |
| `"clip"` | normalized return: the sum to go of \( \min(r_j - \bar r, 0) \), so that no step adds to it | Gao et al. |

Sums and means of normalized rewards are centered; a minimum or a clipped sum is not, so there the return is taken of
raw rewards and normalized afterwards.
"""  # noqa: E501

import torch

from ..choices import unknown_choice


CREDITS = ("sum_to_go", "mean_to_go", "step", "min", "softmin", "delta", "clip")
RETURN_CREDITS = ("min", "softmin", "delta", "clip")
SOFTMIN_TEMPERATURE = 0.1  # PURE's


def credit_steps(normalized: torch.Tensor, credit: str = "sum_to_go") -> torch.Tensor:
    """
    Advantages of steps from their normalized rewards.

    Args:
        normalized (`torch.Tensor` of shape (B, K)):
            Normalized step rewards, NaN where there is none.
        credit (`str`, *optional*, defaults to `"sum_to_go"`):
            `"sum_to_go"`, `"mean_to_go"` or `"step"`.

    Returns:
        `torch.Tensor` of shape (B, K), without NaN. A step without reward adds nothing; it has the sum or mean of the
        steps after it, and with `"step"` 0.

    Raises:
        `ValueError`: if `credit` is none of these.
    """
    scored = ~normalized.isnan()
    rewards = normalized.where(scored, 0)
    match credit:
        case "sum_to_go":
            return sum_to_go(rewards)
        case "mean_to_go":
            return sum_to_go(rewards) / sum_to_go(scored).clamp(min=1)
        case "step":
            return rewards
    raise unknown_choice("credit", credit, CREDITS)


def step_returns(rewards: torch.Tensor, centered: torch.Tensor, credit: str) -> torch.Tensor:
    """
    What a completion returns from each step on, by the credits that are normalized afterwards.

    Args:
        rewards (`torch.Tensor` of shape (B, K)):
            Step rewards, NaN where there is none.
        centered (`torch.Tensor` of shape (B, K)):
            The same less the mean of their group, for `"clip"`.
        credit (`str`):
            `"min"`, `"softmin"`, `"delta"` or `"clip"`.

    Returns:
        `torch.Tensor` of shape (B, K), NaN at steps without reward, and for `"delta"` at the last that has one.

    Raises:
        `ValueError`: if `credit` is none of these.
    """
    scored = ~rewards.isnan()
    match credit:
        case "min":
            returns = rewards.where(scored, torch.inf).flip(-1).cummin(-1).values.flip(-1)
        case "softmin":
            weights = (-rewards / SOFTMIN_TEMPERATURE).masked_fill(~scored, -torch.inf).softmax(-1)
            returns = sum_to_go((weights * rewards).where(scored, 0))
        case "delta":
            is_last = scored & (sum_to_go(scored) == 1)
            returns, scored = rewards, scored & ~is_last  # the differences telescope
        case "clip":
            returns = sum_to_go(centered.clamp(max=0).where(scored, 0))
        case _:
            raise unknown_choice("credit", credit, CREDITS)
    return returns.where(scored, torch.nan)


def first_from_here(values: torch.Tensor) -> torch.Tensor:
    """Each step's value, or where it is NaN that of the next step that has one; 0 where none has, (B, K) to (B, K)."""
    known = ~values.isnan()
    last = values.shape[-1] - 1
    index = torch.arange(last + 1, device=values.device).expand_as(values).masked_fill(~known, last)
    return values.gather(-1, index.flip(-1).cummin(-1).values.flip(-1)).nan_to_num(nan=0.0)


def sum_to_go(values: torch.Tensor) -> torch.Tensor:
    """Sum of each value and all later ones, along the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


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
    # What follows the last step end belongs to the padding, and to a column after it
    edges = torch.nn.functional.pad(step_ends.clamp(max=length - 1), (1, 1), value=-1)
    edges[:, -1] = length - 1
    values = torch.nn.functional.pad(step_values.where(step_ends < length, 0), (0, 1))
    return values.flatten().repeat_interleave(edges.diff().flatten()).view(len(values), length)
