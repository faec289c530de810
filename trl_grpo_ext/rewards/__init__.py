"""Verifiable rewards: of answers, of their form, and of steps by rule."""

from .answer import answer_reward
from .answer_format import format_reward
from .arithmetic import arithmetic_reward


__all__ = ["answer_reward", "arithmetic_reward", "format_reward"]
