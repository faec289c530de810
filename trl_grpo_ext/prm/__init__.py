"""Process reward models: how published ones are called, scoring, and what training one needs."""

from .formats import FORMATS, PRMFormat, TokenClassificationFormat, register_prm_format
from .process_reward_model import ProcessRewardModel


__all__ = ["FORMATS", "PRMFormat", "ProcessRewardModel", "TokenClassificationFormat", "register_prm_format"]
