"""Pure tensor functions of the paper's section 4.1: no trainer, no I/O, no config object."""

from . import gradient_coefficient
from .advantages import outcome_advantages, process_advantages
from .filtering import consistent_completions
from .kl import kl_divergence
from .loss import aggregate, policy_loss


__all__ = [
    "aggregate",
    "consistent_completions",
    "gradient_coefficient",
    "kl_divergence",
    "outcome_advantages",
    "policy_loss",
    "process_advantages",
]
