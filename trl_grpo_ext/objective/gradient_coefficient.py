r"""
One gradient for all methods: Eq. 5 and appendix A.1 of arXiv:2402.03300.

\( \nabla J = E\Big[ \frac{1}{|o|} \sum_t GC_t \, \nabla \log \pi_\theta(o_t) \Big] \): methods differ in where completions come
from, what rewards them, and in the gradient coefficient GC. Each function here is the GC of one method.

| method | completions from | reward | GC |
|---|---|---|---|
| SFT (Eq. 7) | people | | 1 |
| RFT (Eq. 10) | the SFT model | rule | 1 if right, else 0 |
| Online RFT (Eq. 11) | the policy | rule | 1 if right, else 0 |
| DPO (Eq. 14, corrected) | the SFT model, in pairs | rule | \( \pm \beta \sigma(-m) \), m the margin of Eq. 12 |
| PPO (Eq. 18) | the policy | model | ratio times advantage |
| GRPO (Eq. 21) | the policy, in groups | model | ratio times advantage \( + \beta (\pi_{ref} / \pi_\theta - 1) \) |
"""  # noqa: E501

import torch

from .kl import expm1_bounded
from .loss import importance_ratio, sequence_log_ratio


def sft(mask: torch.Tensor) -> torch.Tensor:
    """
    Supervised fine-tuning: 1 at every token (Eq. 7).

    Args:
        mask (`torch.Tensor` of shape (B, T)):
            1 at the completion's own tokens.

    Returns:
        `torch.Tensor` of shape (B, T).
    """
    return mask.float()


def rft(correct: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Rejection sampling fine-tuning: 1 at the tokens of right completions, sampled once from the SFT model (Eq. 10).

    Args:
        correct (`torch.Tensor` of shape (B,)):
            Whether each completion's answer is right.
        mask (`torch.Tensor` of shape (B, T)):
            1 at the completion's own tokens.

    Returns:
        `torch.Tensor` of shape (B, T).
    """
    return correct.float().unsqueeze(-1) * mask


def online_rft(correct: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Online RFT: the coefficient of [`rft`], with completions sampled from the policy as it trains (Eq. 11).

    It is [`grpo`] whose advantage is the reward (`advantage_baseline="none"`, `scale_rewards="none"`), without KL.

    Args:
        correct, mask:
            As for [`rft`].

    Returns:
        `torch.Tensor` of shape (B, T).
    """
    return rft(correct, mask)


def dpo(
    chosen_logps: torch.Tensor,
    chosen_ref_logps: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected_logps: torch.Tensor,
    rejected_ref_logps: torch.Tensor,
    rejected_mask: torch.Tensor,
    beta: float = 0.1,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Direct preference optimization as Eq. 12 has it, with log ratios averaged over a completion's tokens.

    The paper's Eq. 14 is not the gradient of its Eq. 12: it differs from token to token, lacks the factor beta, and is
    not defined for completions of unequal length. The derivative of Eq. 12 is, at every token, \( \beta \sigma(-m) \) with
    \( m = \beta \frac{1}{|o^+|} \sum_t \log \frac{\pi}{\pi_{ref}}(o^+_t) - \beta \frac{1}{|o^-|} \sum_t \log \frac{\pi}{\pi_{ref}}(o^-_t) \).

    Args:
        chosen_logps, chosen_ref_logps, chosen_mask (`torch.Tensor` of shape (B, T)):
            Log probabilities of the better completions under policy and reference, and 1 at their own tokens.
        rejected_logps, rejected_ref_logps, rejected_mask (`torch.Tensor` of shape (B, T')):
            Those of the worse completions.
        beta (`float`, *optional*, defaults to `0.1`):
            Factor of the log ratios. The paper does not give its value.

    Returns:
        Two `torch.Tensor` of shape (B, T) and (B, T'): positive for the better, negative for the worse completions.
    """  # noqa: E501
    margin = beta * (
        sequence_log_ratio(chosen_logps, chosen_ref_logps, chosen_mask)
        - sequence_log_ratio(rejected_logps, rejected_ref_logps, rejected_mask)
    )
    weight = beta * (-margin).sigmoid()
    return weight * chosen_mask, -weight * rejected_mask


def ppo(
    advantages: torch.Tensor,
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
) -> torch.Tensor:
    """
    Proximal policy optimization: ratio times advantage, 0 where the clip cuts it off (Eq. 15).

    The paper's Eq. 18 is the case of one update an exploration, in which the ratio is 1.

    Args:
        advantages (`torch.Tensor` of shape (B, T) or (B, 1)):
            Advantages; in PPO the KL is part of the reward that they come from.
        logps, old_logps, mask (`torch.Tensor` of shape (B, T)):
            Log probabilities of the sampled tokens under policy and sampling policy, and 1 at own tokens.
        epsilon_low, epsilon_high (`float`, *optional*):
            Clip ranges, as for [`~trl_grpo_ext.objective.loss.policy_loss`].

    Returns:
        `torch.Tensor` of shape (B, T).
    """
    ratio = importance_ratio(logps, old_logps, mask)
    epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
    cut_off = ((advantages > 0) & (ratio > 1 + epsilon_high)) | ((advantages < 0) & (ratio < 1 - epsilon_low))
    return (ratio * advantages).masked_fill(cut_off, 0) * mask


def grpo(
    advantages: torch.Tensor,
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor,
    mask: torch.Tensor,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
) -> torch.Tensor:
    """
    GRPO with the KL of Eq. 4 in the loss (Eq. 21); outcome and process supervision differ in their advantages only.

    Args:
        advantages, logps, old_logps, mask, epsilon_low, epsilon_high:
            As for [`ppo`], the advantages from [`~trl_grpo_ext.objective.outcome_advantages`] or
            [`~trl_grpo_ext.objective.process_advantages`].
        ref_logps (`torch.Tensor` of shape (B, T)):
            Log probabilities of the sampled tokens under the reference.
        beta (`float`, *optional*, defaults to `0.04`):
            Coefficient of the KL; the paper's.

    Returns:
        `torch.Tensor` of shape (B, T).
    """
    policy_term = ppo(advantages, logps, old_logps, mask, epsilon_low, epsilon_high)
    reference_term = expm1_bounded((ref_logps - logps).where(mask.bool(), 0))
    return policy_term + beta * reference_term * mask
