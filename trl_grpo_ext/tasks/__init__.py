"""The embedded tasks: problems, tokenizer and a small policy, so that everything runs without a download."""

from pathlib import Path

from .sums import make_sums_dataset
from .word_problems import make_dataset, working_reward


EMBEDDED_POLICY = Path(__file__).with_name("word_problem_policy")

__all__ = ["EMBEDDED_POLICY", "make_dataset", "make_sums_dataset", "working_reward"]
