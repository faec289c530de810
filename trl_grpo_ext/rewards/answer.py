"""Reward for a right final answer: found in the text, then compared with the gold one."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from .extraction import ExtractedAnswer, extract_answer, gold_answer
from .notation import as_number, normalize, number_before_unit
from .symbolic import same_mathematics


logger = logging.getLogger(__name__)

MAX_ANSWER_LENGTH = 256  # characters; a longer "answer" is none, and symbolic checkers can hang on it
WORDS = re.compile(r"(?:\\(?:text|textbf|mathrm|mbox)\{)?\s*(?P<words>[A-Za-z][A-Za-z' -]+[A-Za-z])\s*\}?")
IDLE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # between two digits a space means something
MAX_EXPONENT = 10_000
POWER = r"(?:\^|\*\*)\s*[{(]?\s*-?"
EXPONENT = re.compile(rf"{POWER}(\d+)(?:\s*{POWER}(\d+))?")
REPEATED_FACTORIAL = re.compile(r"![\s)}]*![\s)}]*!")


def answer_reward(completions: list, solution: list[str], **kwargs) -> list[float | None]:
    r"""
    Reward function: 1 if the final answer is right, 0 if it is wrong or missing.

    Numbers are compared exactly, as fractions; other answers as text and, where math-verify is installed, as
    mathematics, for five seconds at most. An answer of more than 256 characters, or with a tower of powers, is wrong.

    In training it logs the shares of completions without an answer (`answer/unparsed`), with a box (`answer/boxed`)
    and with an answer that could not be told right or wrong in time (`answer/unchecked`).

    Args:
        completions (`list`):
            Texts, or conversations whose last message is the completion.
        solution (`list[str]`):
            Gold answers: the answer alone (a number is taken, too), or a solution that ends in `\boxed{...}` or
            `#### ...`.
        **kwargs:
            Other columns, unused.

    Returns:
        `list[float | None]`:
            One reward a completion; `None` where there is no gold answer to compare with (none at all, or one of such
            length), or where math-verify could not tell.
    """
    answers = [extract_answer(completion_text(completion)) for completion in completions]
    golds = [gold_answer(gold) for gold in solution]
    rewards = [
        check_answer(None if answer is None else answer.text, gold)
        for answer, gold in zip(answers, golds, strict=True)
    ]
    unchecked = sum(reward is None and gold is not None for reward, gold in zip(rewards, golds, strict=True))
    if unchecked:
        logger.warning(
            "%d of %d answers could not be told right or wrong in time; their reward is None.", unchecked, len(rewards)
        )
    if log_metric := kwargs.get("log_metric"):
        log_shares(log_metric, answers, unchecked)
    return rewards


def log_shares(
    log_metric: Callable[[str, float], None], answers: list[ExtractedAnswer | None], unchecked: int
) -> None:
    sources = Counter(None if answer is None else answer.source for answer in answers)
    for name, count in (("unparsed", sources[None]), ("boxed", sources["boxed"]), ("unchecked", unchecked)):
        log_metric(f"answer/{name}", count / max(len(answers), 1))


def completion_text(completion: str | list[dict] | None) -> str:
    """Text of a completion, plain or conversational, with content that is text, text parts, or missing."""
    if isinstance(completion, list):
        completion = completion[-1].get("content") if completion else None
    if isinstance(completion, list):
        completion = "".join(part if isinstance(part, str) else part.get("text") or "" for part in completion)
    return completion or ""


def check_answer(answer: str | None, gold: str | None) -> float | None:
    """1 if two answers are the same, 0 if not, `None` if it cannot be told."""
    if gold is None:
        return None
    if answer is None:
        return 0.0
    answer, gold = normalize(answer), normalize(gold)
    if IDLE_SPACE.sub("", answer) == IDLE_SPACE.sub("", gold):
        return 1.0
    if is_beyond_checking(gold):
        return None
    if is_beyond_checking(answer):
        return 0.0
    if (words := WORDS.fullmatch(answer)) and (gold_words := WORDS.fullmatch(gold)):
        # For a symbolic checker "cat" is c * a * t, and so is "act"
        return float(words["words"].lower() == gold_words["words"].lower())
    gold_value, answer_value = as_number(gold), as_number(answer)
    if gold_value is not None and answer_value is None:
        answer_value = number_before_unit(answer)
    if answer_value is not None and gold_value is not None:
        return float(answer_value == gold_value)
    if find_spec("math_verify") is None:
        return 0.0
    verdict = same_mathematics(answer, gold)
    return None if verdict is None else float(verdict)


def can_be_checked(solution: str | float | None) -> bool:
    """Whether a gold solution has an answer that others can be compared with."""
    gold = gold_answer(solution)
    return gold is not None and not is_beyond_checking(normalize(gold))


def is_beyond_checking(answer: str) -> bool:
    """Whether it is too long, or a power too large, to be what anybody asked for."""
    return (
        len(answer) > MAX_ANSWER_LENGTH
        or any(is_too_large(*exponent.groups(default="1")) for exponent in EXPONENT.finditer(answer))
        or REPEATED_FACTORIAL.search(answer) is not None
    )


def is_too_large(exponent: str, its_exponent: str) -> bool:
    """Whether a power is larger than the largest exponent: by its logarithm, as it may be a tower's."""
    return int(its_exponent) * math.log(max(int(exponent), 1)) > math.log(MAX_EXPONENT)
