r"""
The divergence from the reference: Eq. 4 of arXiv:2402.03300 and its siblings, their gradients and their coefficient.

With \( d = \log \pi_\theta - \log \pi_{ref} \) at a sampled token, after Schulman (2020):

| estimator | value | |
|---|---|---|
| `"k1"` | \( d \) | unbiased, may be negative |
| `"k2"` | \( d^2 / 2 \) | biased in value, right in gradient |
| `"k3"` | \( e^{-d} - 1 + d \) | Eq. 4: unbiased, never negative |
| `"abs"` | \( \lvert d \rvert \) | to look at only |
| `"exact"` | \( \sum_v \pi_\theta(v) (\log \pi_\theta(v) - \log \pi_{ref}(v)) \) | no estimate: the whole vocabulary |

A right value does not make a right gradient. [`EXPECTED_GRADIENT`] says what each combination of estimator, placement
and gradient descends in expectation, and [`check_kl`] refuses the rest; the tests enumerate a small policy to show it.
"""

import math
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ..choices import unknown_choice
from .step_credit import sum_to_go


ESTIMATORS = ("k1", "k2", "k3", "abs", "exact")
PLACEMENTS = ("loss", "reward", "both")
GRADIENTS = ("naive", "straight_through", "importance_weighted")
CREDITS = ("suffix", "sequence")

# Beyond this gap, in nats, a gradient grows no further: e^10 is already 22,026 times that of a gap of 0.69.
LARGEST_EXPONENT = 10.0

# (estimator, placement, gradient): what the penalty descends in expectation.
#   sequence: the reverse KL of whole completions
#   token: the reverse KL of each token given its prefix, ignoring that a token changes the prefixes of later ones
#   forward: the forward KL, reference to policy, of each token given its prefix
EXPECTED_GRADIENT = {
    ("k1", "loss", "straight_through"): "token",
    ("k1", "loss", "importance_weighted"): "token",
    ("k2", "loss", "naive"): "token",
    ("k3", "loss", "naive"): "forward",
    ("k3", "loss", "straight_through"): "token",
    ("k3", "loss", "importance_weighted"): "token",
    ("exact", "loss", "naive"): "token",
    ("k1", "reward", "naive"): "sequence",
    ("k1", "both", "naive"): "sequence",
    ("k3", "both", "naive"): "sequence",
    ("exact", "both", "naive"): "sequence",
}


def check_kl(estimator: str, placement: str, gradient: str) -> None:
    """
    Refuse what does not descend a divergence.

    Args:
        estimator (`str`):
            `"k1"`, `"k2"`, `"k3"`, `"abs"` or `"exact"`.
        placement (`str`):
            `"loss"`, `"reward"` or `"both"`.
        gradient (`str`):
            `"naive"`, `"straight_through"` or `"importance_weighted"`.

    Raises:
        `ValueError`: if a name is unknown, or the combination is not in [`EXPECTED_GRADIENT`]; the message says why.
    """
    for field, value, choices in (
        ("kl_estimator", estimator, ESTIMATORS),
        ("kl_placement", placement, PLACEMENTS),
        ("kl_gradient", gradient, GRADIENTS),
    ):
        if value not in choices:
            raise unknown_choice(field, value, choices)
    if (estimator, placement, gradient) not in EXPECTED_GRADIENT:
        raise ValueError(
            f"`kl_estimator` {estimator!r} with `kl_placement` {placement!r} and `kl_gradient` {gradient!r} "
            f"{why_refused(estimator, placement, gradient)}"
        )


def why_refused(estimator: str, placement: str, gradient: str) -> str:
    if estimator == "abs":
        return "is for monitoring only (its mean is logged as `kl/abs`); use 'k3'."
    if placement == "reward" and gradient != "naive":
        return "has no gradient to choose, since a reward is a number; leave `kl_gradient` out."
    if placement == "both" and gradient != "naive":
        return "counts the penalty twice: the reward carries the whole gradient already; use 'naive'."
    if placement == "both":
        return "does not descend the KL, since the value of k2 is not the KL's; use 'k1', 'k3' or 'exact'."
    if placement == "reward" and estimator == "exact":
        return "lacks the gradient of the KL at the token itself; use `kl_placement='both'`."
    if placement == "reward":
        return "does not descend the KL; use 'k1', the one estimator that does so from the reward alone."
    if estimator == "k1":
        return "has an expected gradient of zero, whatever the reference; use 'straight_through', or k1 in the reward."
    if estimator == "k2" and gradient == "importance_weighted":
        return "has another gradient than the KL; use 'naive'."
    return f"changes nothing but noise: {estimator!r} has the right gradient by itself; use 'naive'."


def expm1_bounded(exponent: torch.Tensor) -> torch.Tensor:
    """
    `exp(x) - 1`, going on along its tangent beyond [`LARGEST_EXPONENT`].

    Values stay finite and keep growing, and gradients never exceed the one at the bound: a clamp would have none.
    """
    excess = (exponent - LARGEST_EXPONENT).clamp(min=0)
    return exponent.clamp(max=LARGEST_EXPONENT).expm1() + math.exp(LARGEST_EXPONENT) * excess


def kl_divergence(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """
    Divergence of the policy from the reference at each token.

    Args:
        logps (`torch.Tensor` of shape (B, T)):
            Log probabilities of the sampled tokens, in nats; for `"exact"` of shape (B, T, V), those of all tokens.
        ref_logps (`torch.Tensor` of the shape of `logps`):
            The same under the reference.
        estimator (`str`, *optional*, defaults to `"k3"`):
            `"k1"`, `"k2"`, `"k3"` (Eq. 4), `"abs"` or `"exact"`.

    Returns:
        `torch.Tensor` of shape (B, T) in float32. Finite for any finite input; the gradient of k3 grows no further
        beyond a gap of 10 nats.
    """
    log_ratio = logps.float() - ref_logps.float()
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return expm1_bounded(-log_ratio) + log_ratio  # exp(-d) - 1 + d as written is negative for small d
        case "abs":
            return log_ratio.abs()
        case "exact":
            impossible = logps.isneginf()
            return (logps.float().exp() * log_ratio.masked_fill(impossible, 0)).sum(-1)
    raise unknown_choice("estimator", estimator, ESTIMATORS)


def kl_penalty(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    estimator: str = "k3",
    gradient: str = "naive",
    ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    The divergence as a term of the loss: the value of an estimator with a gradient of one's choice.

    | `gradient` | what is differentiated | source |
    |---|---|---|
    | `"naive"` | the estimator itself | Eq. 4 of the paper |
    | `"straight_through"` | k2, whose gradient is \( d \nabla \log \pi_\theta \); the value stays the estimator's | verl's `k3+` |
    | `"importance_weighted"` | ratio times estimator | DeepSeek-V3.2 (arXiv:2512.02556), Eq. 7; TRL's `use_bias_correction_kl` |

    Args:
        logps, ref_logps (`torch.Tensor` of shape (B, T)):
            Log probabilities of the sampled tokens under policy and reference.
        estimator, gradient (`str`, *optional*):
            As above.
        ratio (`torch.Tensor` of shape (B, T), *optional*):
            Importance ratio of policy to sampling policy, with its gradient; for `"importance_weighted"`.

    Returns:
        `torch.Tensor` of shape (B, T).
    """  # noqa: E501
    divergence = kl_divergence(logps, ref_logps, estimator)
    match gradient:
        case "naive":
            return divergence
        case "straight_through":
            differentiated = kl_divergence(logps, ref_logps, "k2")
            return divergence.detach() + differentiated - differentiated.detach()
        case "importance_weighted":
            if ratio is None:
                raise ValueError("`ratio` is missing, but gradient='importance_weighted' weights by it.")
            return ratio * divergence
    raise unknown_choice("gradient", gradient, GRADIENTS)


def exact_kl(
    hidden: torch.Tensor,
    ref_hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    ref_to_logits: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int = 256,
) -> torch.Tensor:
    """
    KL over the full vocabulary, projecting to it a few tokens at a time, forwards and backwards.

    Args:
        hidden, ref_hidden (`torch.Tensor` of shape (N, H)):
            Last hidden states of policy and reference at N tokens.
        to_logits, ref_to_logits (`Callable`):
            From hidden states (n, H) to logits (n, V), divided by the sampling temperature.
        chunk_size (`int`, *optional*, defaults to `256`):
            Number of tokens whose logits, policy's and reference's, are held at a time.

    Returns:
        `torch.Tensor` of shape (N,).
    """

    def chunk_kl(chunk: torch.Tensor, ref_chunk: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            ref_logps = ref_to_logits(ref_chunk).float().log_softmax(-1)
        return kl_divergence(to_logits(chunk).float().log_softmax(-1), ref_logps, "exact")

    chunks = zip(hidden.split(chunk_size), ref_hidden.split(chunk_size), strict=True)
    return torch.cat([checkpoint(chunk_kl, *pair, use_reentrant=False) for pair in chunks])


def credit_kl(kl: torch.Tensor, mask: torch.Tensor, credit: str = "suffix") -> torch.Tensor:
    """
    The divergence that a token answers for where it is part of the reward, as in PPO (Eq. 2 of the paper).

    Args:
        kl (`torch.Tensor` of shape (B, T)):
            Divergence at each token.
        mask (`torch.Tensor` of shape (B, T)):
            1 at the completion's own tokens.
        credit (`str`, *optional*, defaults to `"suffix"`):
            `"suffix"`: that of the token and all later ones; `"sequence"`: that of the whole completion, which has the
            same expected gradient with more noise.

    Returns:
        `torch.Tensor` of shape (B, T), 0 where the mask is.
    """
    masked = kl.where(mask.bool(), 0)
    match credit:
        case "suffix":
            return sum_to_go(masked) * mask
        case "sequence":
            return masked.sum(-1, keepdim=True) * mask
    raise unknown_choice("credit", credit, CREDITS)


def adapted_coefficient(coefficient: float, kl: float, target: float, horizon: float, num_completions: int) -> float:
    """
    Raise the coefficient while the KL is above its target, lower it while below (Ziegler et al., arXiv:1909.08593).

    Args:
        coefficient (`float`):
            The present coefficient, beta.
        kl (`float`):
            Mean divergence a token since the last call, in nats.
        target (`float`):
            Divergence to steer to, in nats a token.
        horizon (`float`):
            Number of completions over which a full error (20 %) changes the coefficient by 20 %.
        num_completions (`int`):
            Completions since the last call.

    Returns:
        `float`, the next coefficient.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_completions / horizon)
