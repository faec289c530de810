"""Reward for a right final answer: found in the text, then compared with the gold one."""

import re
import threading
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec


MAX_ANSWER_LENGTH = 256  # characters; a longer "answer" is none, and symbolic checkers can hang on it
SECONDS_TO_VERIFY = 2
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(rf"(?:(?<![\d)])[-+])?(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:/\d+)?")
NUMERIC_ANSWER = re.compile(rf"(?P<number>[-+]?(?:{DIGITS}(?:\.\d+)?|\.\d+))(?:/(?P<denominator>\d+))?")
ANSWER_PHRASE = re.compile(r"answer is", re.IGNORECASE)
MARKED_ANSWER = re.compile(r"\s*:?\s*\$([^$]+)\$")
IDLE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # between two digits a space means something
BRACES = re.compile(r"\\boxed\{|\{|\}")


def answer_reward(completions: list, solution: list[str], **kwargs) -> list[float | None]:
    r"""
    Reward function: 1 if the final answer is right, 0 if it is wrong or missing.

    Numbers are compared exactly, as fractions; other answers as text and, where math-verify is installed, as
    mathematics.

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
            One reward a completion; `None` where the gold answer is empty, or where only math-verify could tell but
            this is not the main thread (its time limit needs the main thread).
    """
    return [
        check_answer(final_answer(completion_text(completion)), gold_answer(gold))
        for completion, gold in zip(completions, solution, strict=True)
    ]


def completion_text(completion: str | list[dict] | None) -> str:
    """Text of a completion, plain or conversational, with content that is text, text parts, or missing."""
    if isinstance(completion, list):
        completion = completion[-1].get("content") if completion else None
    if isinstance(completion, list):
        completion = "".join(part.get("text", "") for part in completion)
    return completion or ""


def final_answer(text: str) -> str | None:
    r"""
    The final answer of a text: the last balanced `\boxed{...}`, else what follows the last `####`, else the number, or
    what stands between dollar signs, right after the last "answer is", else the last number; `None` if there is none.

    Where a box was opened, only a box counts: one that was cut off is no answer.
    """
    if r"\boxed{" in text:
        return last_boxed(text)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().partition("\n")[0] or None
    *before, after = ANSWER_PHRASE.split(text)
    if before and (marked := MARKED_ANSWER.match(after)):
        return marked.group(1).strip()
    if before and (number := NUMBER.search(after)):
        return number.group()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Content of the `\boxed{...}` that opens last of those whose braces balance."""
    last_start, content = -1, None
    open_braces: list[re.Match] = []
    for brace in BRACES.finditer(text):
        if brace.group() != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and opening.start() > last_start:
                last_start, content = opening.start(), text[opening.end() : brace.start()].strip()
    return content or None


def gold_answer(gold: str | float | None) -> str | None:
    """The answer in a gold solution, or the gold text itself if it is only an answer."""
    text = "" if gold is None else str(gold)
    return final_answer(text) if r"\boxed{" in text or "####" in text else text.strip() or None


def check_answer(answer: str | None, gold: str | None) -> float | None:
    """1 if two answers are the same, 0 if not, `None` if it cannot be told."""
    if gold is None:
        return None
    if answer is None:
        return 0.0
    if IDLE_SPACE.sub("", answer) == IDLE_SPACE.sub("", gold):
        return 1.0
    if len(answer) > MAX_ANSWER_LENGTH:
        return 0.0
    answer_value, gold_value = as_number(answer), as_number(gold)
    if answer_value is not None and gold_value is not None:
        return float(answer_value == gold_value)
    if find_spec("math_verify") is None:
        return 0.0
    if threading.current_thread() is not threading.main_thread():
        return None
    return float(same_mathematics(answer, gold))


def as_number(answer: str) -> Fraction | None:
    """The value of a plain number (sign, thousands commas, decimals, one fraction bar), else `None`."""
    match = NUMERIC_ANSWER.fullmatch(answer.strip().strip("$").strip().removesuffix("."))
    if match is None or int(match["denominator"] or 1) == 0:
        return None
    return Fraction(match["number"].replace(",", "")) / int(match["denominator"] or 1)


@lru_cache(maxsize=10_000)
def same_mathematics(answer: str, gold: str) -> bool:
    """Whether math-verify takes two answers for the same; it reads them only if they are marked as mathematics."""
    from math_verify import parse, verify

    gold_parsed, answer_parsed = (parse(f"${text}$", parsing_timeout=SECONDS_TO_VERIFY) for text in (gold, answer))
    return verify(gold_parsed, answer_parsed, timeout_seconds=SECONDS_TO_VERIFY)
