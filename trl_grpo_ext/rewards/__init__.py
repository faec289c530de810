"""Verifiable rewards: of answers, and of steps by rule."""

from .answer import answer_reward
from .arithmetic import arithmetic_reward


__all__ = ["answer_reward", "arithmetic_reward"]
