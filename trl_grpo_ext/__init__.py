"""DeepSeekMath (arXiv:2402.03300) for TRL."""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_SUBMODULES = {
    "GRPOExtConfig": ".trainers.grpo_config",
    "GRPOExtTrainer": ".trainers.grpo_trainer",
    "IterativeGRPOConfig": ".trainers.iterative_config",
    "IterativeGRPOTrainer": ".trainers.iterative_trainer",
    "OutcomeRewardModel": ".iterative.outcome_reward_model",
    "PRMConfig": ".trainers.prm_config",
    "PRMTrainer": ".trainers.prm_trainer",
    "ProcessRewardModel": ".prm.process_reward_model",
}

__all__ = [
    "GRPOExtConfig",
    "GRPOExtTrainer",
    "IterativeGRPOConfig",
    "IterativeGRPOTrainer",
    "OutcomeRewardModel",
    "PRMConfig",
    "PRMTrainer",
    "ProcessRewardModel",
]

if TYPE_CHECKING:
    from .iterative.outcome_reward_model import OutcomeRewardModel
    from .prm.process_reward_model import ProcessRewardModel
    from .trainers.grpo_config import GRPOExtConfig
    from .trainers.grpo_trainer import GRPOExtTrainer
    from .trainers.iterative_config import IterativeGRPOConfig
    from .trainers.iterative_trainer import IterativeGRPOTrainer
    from .trainers.prm_config import PRMConfig
    from .trainers.prm_trainer import PRMTrainer


def __getattr__(name: str):
    # TRL and torch take seconds to import, which the pure parts of the package do not need.
    if name in _SUBMODULES:
        return getattr(import_module(_SUBMODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
