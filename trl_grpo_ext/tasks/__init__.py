"""The embedded tasks: problems, tokenizer, small policy and small judge, so that nothing needs a download."""

from pathlib import Path

from .sums import make_sums_dataset
from .word_problems import make_dataset, working_reward


EMBEDDED_POLICY = Path(__file__).with_name("word_problem_policy")
EMBEDDED_JUDGE = Path(__file__).with_name("word_problem_judge")  # the base of reward models

__all__ = ["EMBEDDED_JUDGE", "EMBEDDED_POLICY", "make_dataset", "make_sums_dataset", "working_reward"]
