"""Rewards of length, of which TRL has those of whole completions."""

from collections.abc import Callable
from itertools import pairwise

from trl.rewards import get_soft_overlong_punishment


def get_step_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable:
    r"""
    Step reward: what each step adds to DAPO's soft overlong punishment (arXiv:2503.14476, Eq. 13).

    The scores of a completion's steps add up to [`~trl.rewards.get_soft_overlong_punishment`] of the whole. A step has
    the punishment of growing from the end of the step before it to its own end: 0 for what lies within the length that
    is free, so that of a long completion only the steps at its end are punished.

    Args:
        max_completion_len (`int`):
            Longest completion in tokens, \( L_{\max} \).
        soft_punish_cache (`int`):
            Length in tokens of the interval before it, over which the punishment grows from 0 to -1.

    Returns:
        `Callable`: a step reward function, which takes `step_ends` and returns one score a step.
    """
    punish = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)

    def step_overlong_punishment(step_ends: list[list[int]], **kwargs) -> list[list[float]]:
        return [
            [later - earlier for earlier, later in pairwise([0.0, *punish([range(end + 1) for end in ends])])]
            for ends in step_ends
        ]

    return step_overlong_punishment
