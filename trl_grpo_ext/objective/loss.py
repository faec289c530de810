r"""
Eq. 3 of arXiv:2402.03300 in its parts: ratio, clip, and what the sum over tokens is divided by.

The trainer leaves the policy term to TRL, which has the same formulas; these are the ones to read and to test against.
What it takes from here is the aggregation of its own KL term, the ratio of GSPO-token and the live-group denominator.
"""

import torch

from ..choices import unknown_choice
from .kl import LARGEST_EXPONENT, expm1_bounded


RATIO_LEVELS = ("token", "sequence", "sequence_token")
GLOBAL_TOKEN_LOSSES = ("dapo", "cispo", "vespo")  # divided by the number of tokens of the global batch
LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *GLOBAL_TOKEN_LOSSES)


def importance_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, level: str = "token"
) -> torch.Tensor:
    r"""
    Ratio of the policy to the one that sampled, \( \pi_\theta / \pi_{old} \).

    | `level` | ratio | gradient | source |
    |---|---|---|---|
    | `"token"` | of each token | of its token | Eq. 3 of the paper |
    | `"sequence"` | geometric mean over the completion, (B, 1) | of all tokens | GSPO, arXiv:2507.18071 |
    | `"sequence_token"` | that of the completion | of its token | GSPO-token, ibid.: the one for token advantages |

    Args:
        logps, old_logps, mask (`torch.Tensor` of shape (B, T)):
            Log probabilities of the sampled tokens under both policies, and 1 at the completion's own tokens.
        level (`str`, *optional*, defaults to `"token"`):
            As above.

    Returns:
        `torch.Tensor` of shape (B, T), or (B, 1) for `"sequence"`; 1 at masked tokens.
    """
    match level:
        case "token":
            log_ratio = (logps - old_logps).where(mask.bool(), 0)
        case "sequence":
            log_ratio = sequence_log_ratio(logps, old_logps, mask)
        case "sequence_token":
            log_ratio = (logps - gspo_token_old_logps(logps, old_logps, mask)).where(mask.bool(), 0)
        case _:
            raise unknown_choice("level", level, RATIO_LEVELS)
    return 1 + expm1_bounded(log_ratio)


def sequence_log_ratio(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean log ratio of a completion's tokens, (B, T) to (B, 1): the log of GSPO's ratio."""
    log_ratio = (logps - old_logps).where(mask.bool(), 0)
    return log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def gspo_token_old_logps(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    The old log probabilities under which a token's ratio has the value of its completion's.

    A token-level loss that is given these instead of `old_logps` is that of GSPO-token: the ratio's value is the
    sequence's, its gradient the token's.

    Args:
        logps, old_logps, mask (`torch.Tensor` of shape (B, T)):
            As for [`importance_ratio`].

    Returns:
        `torch.Tensor` of shape (B, T), without gradient.
    """
    return logps.detach() - sequence_log_ratio(logps, old_logps, mask).detach()


def bounded_old_logps(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Old log probabilities no further than 10 nats from the policy's, and equal to them where the mask is 0.

    A loss that is given these has finite ratios, with a gradient (`exp` of a gap of 150 has neither: at a masked token
    its backward pass is 0 times infinity).
    """
    log_ratio = (logps.detach() - old_logps).where(mask.bool(), 0)
    return logps.detach() - log_ratio.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)


def policy_loss(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> torch.Tensor:
    r"""
    The clipped policy term of Eq. 3 at each token, \( -\min(r A, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon) A) \).

    Args:
        ratio (`torch.Tensor` of shape (B, T) or (B, 1)):
            Importance ratio.
        advantages (`torch.Tensor` of shape (B, T) or (B, 1)):
            Advantages.
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            Lower clip range. The paper does not give its value.
        epsilon_high (`float`, *optional*):
            Upper clip range, `epsilon_low` by default; 0.28 is DAPO's clip-higher (arXiv:2503.14476).
        delta (`float`, *optional*):
            Largest ratio with a negative advantage, the second side of two-sided clipping (INTELLECT-2,
            arXiv:2505.07291).

    Returns:
        `torch.Tensor` of shape (B, T) or (B, 1).
    """
    epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(unclipped * advantages, clipped * advantages)


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    *,
    normalizer: float | torch.Tensor | None = None,
    max_completion_length: int | None = None,
) -> torch.Tensor:
    """
    One loss from those of the tokens, with the denominator of a loss type.

    | `loss_type` | sum over | divided by | source |
    |---|---|---|---|
    | `"grpo"`, `"sapo"` | means of completions | number of completions | Eq. 3 of the paper; SAPO, arXiv:2511.20347 |
    | `"dapo"`, `"cispo"`, `"vespo"` | tokens | number of tokens in the global batch | DAPO, arXiv:2503.14476 |
    | `"bnpo"` | tokens | number of tokens in the local batch, so that it depends on how a batch is cut | |
    | `"dr_grpo"` | tokens | number of completions times `max_completion_length` | Dr. GRPO, arXiv:2503.20783 |
    | `"luspo"` | tokens | number of completions | LUSPO, arXiv:2602.05261 |

    Args:
        per_token (`torch.Tensor` of shape (B, T)):
            Loss of each token.
        mask (`torch.Tensor` of shape (B, T)):
            1 at the completion's own tokens.
        loss_type (`str`):
            As above.
        normalizer (`float` or 0-d `torch.Tensor`, *optional*):
            What to divide by, where `per_token` is part of a larger batch. By default that of `per_token` itself.
        max_completion_length (`int`, *optional*):
            The constant of `"dr_grpo"`, which needs it unless `normalizer` is given.

    Returns:
        0-d `torch.Tensor`; 0 if nothing is unmasked.
    """
    if normalizer is None:
        normalizer = local_normalizer(mask, loss_type, max_completion_length)
    # what a masked token holds, be it NaN, must not count
    return (per_token.where(mask.bool(), 0) * token_weights(mask, loss_type, normalizer)).sum()


def local_normalizer(
    mask: torch.Tensor, loss_type: str, max_completion_length: int | None = None
) -> float | torch.Tensor:
    """What [`aggregate`] divides by where there is nothing but the completions of `mask`."""
    num_completions = max(len(mask), 1)
    match loss_type:
        case "grpo" | "sapo" | "luspo":
            return num_completions
        case "dapo" | "cispo" | "vespo" | "bnpo":
            return mask.sum().clamp(min=1)
        case "dr_grpo":
            if max_completion_length is None:
                raise ValueError("`max_completion_length` is missing, but loss_type='dr_grpo' divides by it.")
            return num_completions * max_completion_length
    raise unknown_choice("loss_type", loss_type, LOSS_TYPES)


def token_weights(mask: torch.Tensor, loss_type: str, normalizer: float | torch.Tensor) -> torch.Tensor:
    """What each token's loss is multiplied by in [`aggregate`], (B, T)."""
    weights = mask / normalizer
    return weights / mask.sum(-1, keepdim=True).clamp(min=1) if loss_type in ("grpo", "sapo") else weights


def live_group_scale(is_live: torch.Tensor, lengths: torch.Tensor, loss_type: str) -> torch.Tensor:
    """
    What to multiply advantages by so that only live groups are in the denominator.

    Completions of all-same groups have advantage 0, but are counted where a loss is divided; leaving them out makes
    the mean one over completions that train (what DAPO's dynamic sampling has, without sampling again). It changes the
    objective: the fewer groups are live, the larger the step.

    Args:
        is_live (`torch.Tensor` of shape (N,)):
            Whether each completion of the global generation batch belongs to a group with a non-zero advantage.
        lengths (`torch.Tensor` of shape (N,)):
            Number of own tokens of each completion.
        loss_type (`str`):
            Decides what is counted: completions, or tokens.

    Returns:
        0-d `torch.Tensor`: all completions (or tokens) over live ones, 1 if there is none.
    """
    counted = lengths.float() if loss_type in GLOBAL_TOKEN_LOSSES else torch.ones_like(lengths).float()
    live = counted.where(is_live, 0).sum()
    return torch.where(live > 0, counted.sum() / live.clamp(min=1), 1.0)
