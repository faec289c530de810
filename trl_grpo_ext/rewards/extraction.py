"""Where the final answer of a text stands."""

import re
from dataclasses import dataclass

from .numerals import CHINESE_NUMBER


BOX = r"\boxed{"
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(rf"(?:(?<![\d)])[-+\u2212])?(?:{DIGITS}(?:\.\d+)?|\.\d+)(?:/\d+)?")
COLON = r"[:\uff1a]"
ANSWER_PHRASE = re.compile(rf"\banswer(?: is|:)|答案(?:是|为|{COLON})", re.IGNORECASE)
MARKED_ANSWER = re.compile(rf"\s*{COLON}?\s*(?:\$([^$]+)\$|(-?\\[A-Za-z]+(?:\{{[^{{}}]*\}})+))")
BRACES = re.compile(r"\\boxed\{|\{|\}")
MINERVA_ANSWER = re.compile(r"final answer is \$(.*?)\$\. I hope", re.DOTALL)


@dataclass(frozen=True)
class ExtractedAnswer:
    r"""
    A final answer and where it was found.

    Args:
        text (`str`):
            The answer as written.
        source (`str`):
            `"boxed"`: in `\boxed{...}`; `"hashes"`: after `####`; `"phrase"`: after "answer is"; `"last_number"`: the
            last number of the text, for want of a better one.
    """

    text: str
    source: str


def extract_answer(text: str) -> ExtractedAnswer | None:
    r"""
    The final answer of a text: the last balanced `\boxed{...}`, else what follows the last `####`, else the number, or
    what stands between dollar signs, right after the last "answer is" ("答案是"), else the last number; `None` if
    there is none.

    Where a box was opened, only a box counts: one that was cut off is no answer.
    """
    if BOX in text:
        boxes = boxed_answers(text)
        return ExtractedAnswer(boxes[-1], "boxed") if boxes and boxes[-1] else None
    if "####" in text:
        line = text.rsplit("####", 1)[1].strip().partition("\n")[0]
        return ExtractedAnswer(line, "hashes") if line else None
    *before, after = ANSWER_PHRASE.split(text)
    if before and (marked := MARKED_ANSWER.match(after)):
        return ExtractedAnswer((marked[1] or marked[2]).strip(), "phrase")
    if before and (number := NUMBER.search(after) or CHINESE_NUMBER.search(after)):
        return ExtractedAnswer(number.group(), "phrase")
    numbers = NUMBER.findall(text)
    return ExtractedAnswer(numbers[-1], "last_number") if numbers else None


def final_answer(text: str) -> str | None:
    """The text of [`extract_answer`]'s answer."""
    answer = extract_answer(text)
    return None if answer is None else answer.text


def boxed_answers(text: str) -> list[str]:
    r"""Contents of the balanced `\boxed{...}` of a text, in the order in which they open."""
    contents: dict[int, str] = {}
    open_braces: list[re.Match] = []
    for brace in BRACES.finditer(text):
        if brace.group() != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                contents[opening.start()] = text[opening.end() : brace.start()].strip()
    return [contents[start] for start in sorted(contents)]


def deepseekmath_answers(text: str) -> list[str]:
    r"""
    The answers of a text in the order in which DeepSeekMath's evaluation looks for them: between "final answer is $"
    and "$. I hope"; else in all `\boxed{...}`; else after the last "he answer is"; else the last number.

    What it looks for in programs' output is left out, since no programs are run. Each answer is its first line.
    """
    if marked := MINERVA_ANSWER.search(text):
        answers = [marked.group(1)]
    elif boxes := boxed_answers(text):
        answers = boxes
    elif "he answer is" in text:
        answers = [text.rsplit("he answer is", 1)[1]]
    else:
        answers = NUMBER.findall(text)[-1:]
    lines = [answer.strip().partition("\n")[0].strip(": ").rstrip("./") for answer in answers]
    return [line for line in lines if line]


def gold_answer(gold: str | float | None) -> str | None:
    """The answer in a gold solution, or the gold text itself if it is only an answer."""
    text = "" if gold is None else str(gold)
    return final_answer(text) if BOX in text or "####" in text else text.strip() or None
