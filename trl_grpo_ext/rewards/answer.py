"""Reward for a right final answer: found in the text, then compared with the gold one."""

import re
import threading
from fractions import Fraction
from importlib.util import find_spec


MAX_ANSWER_LENGTH = 256  # characters; a longer "answer" is none, and symbolic checkers can hang on it
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
ANSWER_PHRASE = re.compile(r"answer is", re.IGNORECASE)
NUMERIC_ANSWER = re.compile(r"(?P<number>[-+]?(?:\d+(?:\.\d+)?|\.\d+))(?:/(?P<denominator>\d+))?")


def answer_reward(completions: list, solution: list[str], **kwargs) -> list[float | None]:
    r"""
    Reward function: 1 if the final answer is right, 0 if it is wrong or missing.

    Numbers are compared exactly, as fractions; other answers as text and, where math-verify is installed, as
    mathematics.

    Args:
        completions (`list`):
            Texts, or conversations whose last message is the completion.
        solution (`list[str]`):
            Gold answers: the answer alone, or a solution that ends in `\boxed{...}` or `#### ...`.
        **kwargs:
            Other columns, unused.

    Returns:
        `list[float | None]`:
            One reward a completion; `None` where the gold answer is empty, or where only math-verify could tell but is
            not installed or this is not the main thread (its time limit needs the main thread).
    """
    return [
        check_answer(final_answer(completion_text(completion)), gold_answer(gold))
        for completion, gold in zip(completions, solution, strict=True)
    ]


def completion_text(completion: str | list[dict]) -> str:
    """Text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1].get("content") or ""


def final_answer(text: str) -> str | None:
    r"""
    The final answer of a text: the last balanced `\boxed{...}`, else what follows the last `####`, else the first
    number after the last "answer is", else the last number; `None` if there is none of these.

    Where a box was opened, only a box counts: one that was cut off is no answer.
    """
    if r"\boxed{" in text:
        return last_boxed(text)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().partition("\n")[0] or None
    *before, after = ANSWER_PHRASE.split(text)
    if before and (match := NUMBER.search(after)):
        return match.group()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance."""
    opening = r"\boxed{"
    start = text.rfind(opening)
    while start != -1:
        depth = 0
        for index in range(start + len(opening) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(opening) : index].strip() or None
        start = text.rfind(opening, 0, start)
    return None


def gold_answer(gold: str) -> str | None:
    """The answer in a gold solution, or the gold text itself if it is only an answer."""
    return final_answer(gold) if r"\boxed{" in gold or "####" in gold else gold.strip() or None


def check_answer(answer: str | None, gold: str | None) -> float | None:
    """1 if two answers are the same, 0 if not, `None` if it cannot be told."""
    if gold is None:
        return None
    if answer is None or len(answer) > MAX_ANSWER_LENGTH:
        return 0.0
    answer_value, gold_value = as_number(answer), as_number(gold)
    if answer_value is not None and gold_value is not None:
        return float(answer_value == gold_value)
    if "".join(answer.split()) == "".join(gold.split()):
        return 1.0
    if find_spec("math_verify") is None or threading.current_thread() is not threading.main_thread():
        return None
    return float(same_mathematics(answer, gold))


def as_number(answer: str) -> Fraction | None:
    """The value of a plain number (sign, thousands commas, decimals, one fraction bar), else `None`."""
    plain = answer.replace(",", "").strip().strip("$").removesuffix(".")
    match = NUMERIC_ANSWER.fullmatch(plain)
    if match is None or (match["denominator"] is not None and int(match["denominator"]) == 0):
        return None
    return Fraction(match["number"]) / int(match["denominator"] or 1)


def same_mathematics(answer: str, gold: str) -> bool:
    """Whether math-verify takes two answers for the same; it reads them only if they are marked as mathematics."""
    from math_verify import parse, verify

    return verify(parse(f"${gold}$"), parse(f"${answer}$"))
