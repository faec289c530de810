"""
Credit: how the normalized rewards of reasoning steps become the advantages of their tokens.

The paper sums over the following steps (arXiv:2402.03300, 4.1.3), so that a first token's advantage is the number of
steps times their mean normalized reward. The other forms are published remedies against padding with easy steps.
"""

import torch


CREDITS = ("sum_to_go", "mean_to_go", "step", "min", "softmin", "delta", "clip")
SOFTMIN_TEMPERATURE = 0.1  # PURE's


def credit_steps(normalized: torch.Tensor, credit: str = "sum_to_go") -> torch.Tensor:
    r"""
    Advantages of steps from their normalized rewards, \( \tilde r_1 \dots \tilde r_K \).

    | `credit` | advantage of step j | source |
    |---|---|---|
    | `"sum_to_go"` | sum of its own and all later rewards | 4.1.3 of the paper |
    | `"mean_to_go"` | mean of its own and all later rewards | |
    | `"step"` | its own reward | |
    | `"min"` | smallest of its own and all later rewards | the hard form of PURE |
    | `"softmin"` | sum to go of the rewards times \( \mathrm{softmax}(-\tilde r / 0.1) \) over all steps | PURE, arXiv:2504.15275 |
    | `"delta"` | sum to go of \( \tilde r_j - \tilde r_{j+1} \), that is its own reward; 0 for the last step, whose reward is the outcome's | Gao et al., arXiv:2410.15115 |
    | `"clip"` | sum to go of \( \min(\tilde r_j, 0) \): no step earns more than the average one | Gao et al. |

    Args:
        normalized (`torch.Tensor` of shape (B, K)):
            Normalized step rewards, NaN where there is none.
        credit (`str`, *optional*, defaults to `"sum_to_go"`):
            The form of credit.

    Returns:
        `torch.Tensor` of shape (B, K), without NaN: a step without reward adds nothing, and has the credit of the
        steps after it.

    Raises:
        `ValueError`: if `credit` is unknown.
    """  # noqa: E501
    scored = ~normalized.isnan()
    rewards = normalized.where(scored, 0)
    match credit:
        case "sum_to_go":
            return sum_to_go(rewards)
        case "mean_to_go":
            return sum_to_go(rewards) / sum_to_go(scored).clamp(min=1)
        case "step":
            return rewards
        case "min":
            smallest = normalized.where(scored, torch.inf).flip(-1).cummin(-1).values.flip(-1)
            return smallest.masked_fill(smallest.isinf(), 0)
        case "softmin":
            weights = (-rewards / SOFTMIN_TEMPERATURE).masked_fill(~scored, -torch.inf).softmax(-1)
            return sum_to_go(weights.where(scored, 0) * rewards)
        case "delta":
            # The differences telescope: what is left is the first reward from here on.
            return first_from_here(rewards, scored).where(sum_to_go(scored) > 1, 0)
        case "clip":
            return sum_to_go(rewards.clamp(max=0))
    raise ValueError(f"`credit` is {credit!r}, but must be one of {', '.join(map(repr, CREDITS))}.")


def sum_to_go(values: torch.Tensor) -> torch.Tensor:
    """Sum of each value and all later ones, along the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


def first_from_here(rewards: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """The reward of each step, or where it has none that of the next scored one, (B, K) to (B, K)."""
    last = rewards.shape[-1] - 1
    index = torch.arange(last + 1, device=rewards.device).expand_as(rewards).masked_fill(~scored, last)
    return rewards.gather(-1, index.flip(-1).cummin(-1).values.flip(-1))


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
