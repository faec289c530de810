"""Verifiable rewards."""

from .answer import answer_reward


__all__ = ["answer_reward"]
