"""How answers are written: one form of characters for all, and the values of what are numbers."""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from .extraction import DIGITS
from .numerals import CHINESE_NUMBER, chinese_number


NUMERIC_ANSWER = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<whole>\d+) (?=\d+/))?(?P<number>{DIGITS}(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})|/(?P<denominator>\d+))?"
)
NUMBER_WITH_UNIT = re.compile(r"(?P<number>[-+]?[\d.,/]+)\s*(?:[^\W\d_]{2,}\s*)+")
CHINESE_WITH_UNIT = re.compile(rf"(?P<number>{CHINESE_NUMBER.pattern})[^\W\d_]?")
MULTIPLES = {"百": 100, "千": 10**3, "万": 10**4, "亿": 10**8}
MULTIPLES |= {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
# 千米 and 千克 are units, kilometre and kilogram
MULTIPLIED = re.compile(
    rf"(?P<number>[-+]?[\d.,]+)\s*(?P<multiple>{'|'.join(MULTIPLES)})(?![米克])[^\W\d_\s]?(?:\s+\w+)?"
)
# Digits, letters and signs of Chinese texts; raised digits; dashes and spaces
ONE_FORM: dict[int, int | str] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
ONE_FORM |= {
    ord(raised): f"^{{{digit}}}"
    for digit, raised in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
}
ONE_FORM |= {0x2212: "-", 0x2013: "-", 0x3000: " ", ord("\n"): " "}
FRACTION_SIGN = re.compile(r"(?P<whole>\d?)\s*(?P<sign>[\u00bc-\u00be\u2150-\u215e])")
SPACED_DIGITS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;! ]|\s)(?=\d{3}(?!\d))")


@lru_cache(maxsize=10_000)
def normalize(answer: str) -> str:
    r"""An answer in one form of digits, signs and spaces, without emphasis around it."""
    text = FRACTION_SIGN.sub(written_out, answer.translate(ONE_FORM)).strip()
    text = text.strip("*_`").strip().strip("$€£¥").strip().removesuffix(".").strip()
    return SPACED_DIGITS.sub("", text)


def written_out(fraction: re.Match) -> str:
    """A fraction that is one character as "1/2", or as "1 1/2" after a whole number."""
    value = unicodedata.normalize("NFKC", fraction["sign"]).replace("\u2044", "/")
    return f"{fraction['whole']} {value}".strip()


def as_number(answer: str) -> Fraction | None:
    """The value of a number (commas, decimals, exponents, fractions, "1 1/2", "2 million", Chinese), else `None`."""
    text = normalize(answer)
    if multiplied := MULTIPLIED.fullmatch(text):
        number = as_number(multiplied["number"])
        return None if number is None else number * MULTIPLES[multiplied["multiple"]]
    if chinese := CHINESE_WITH_UNIT.fullmatch(text):
        return chinese_number(chinese["number"])
    match = NUMERIC_ANSWER.fullmatch(text)
    if match is None or int(match["denominator"] or 1) == 0:
        return None
    number = Fraction(match["number"].replace(",", "") + (f"e{match['exponent']}" if match["exponent"] else ""))
    value = int(match["whole"] or 0) + number / int(match["denominator"] or 1)
    return -value if match["sign"] == "-" else value


def number_before_unit(answer: str) -> Fraction | None:
    """The number of "5 apples", `None` if there is more or less than that."""
    counted = NUMBER_WITH_UNIT.fullmatch(normalize(answer))
    return None if counted is None else as_number(counted["number"])
