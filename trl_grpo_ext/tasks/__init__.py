"""The embedded task: problems, tokenizer and a small policy, so that everything runs without a download."""

from pathlib import Path

from .word_problems import make_dataset, working_reward


EMBEDDED_POLICY = Path(__file__).with_name("word_problem_policy")

__all__ = ["EMBEDDED_POLICY", "make_dataset", "working_reward"]
