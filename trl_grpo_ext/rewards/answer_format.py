"""Reward for the form of an answer, whether or not it is right."""

from .answer import completion_text
from .extraction import BOX, boxed_answers


def format_reward(completions: list, **kwargs) -> list[float]:
    r"""
    Reward function: 1 for a completion that states its answer once, in the form asked for, else 0.

    That form is one `\boxed{...}`, closed and not empty: several boxes are as many guesses. For `<think>` tags take
    `trl.rewards.think_format_reward`.

    Args:
        completions (`list`):
            Texts, or conversations whose last message is the completion.
        **kwargs:
            Other columns, unused.

    Returns:
        `list[float]`: one reward a completion.
    """
    return [float(states_one_answer(completion_text(completion))) for completion in completions]


def states_one_answer(text: str) -> bool:
    return text.count(BOX) == 1 and any(boxed_answers(text))
