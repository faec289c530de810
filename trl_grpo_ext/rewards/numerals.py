"""Chinese numerals, as answers to Chinese problems write them."""

import re
import unicodedata
from fractions import Fraction


DIGITS = "零〇一二两三四五六七八九"
CHINESE_NUMBER = re.compile(rf"[{DIGITS}十百千万亿点分之负]*[{DIGITS}十百千万亿]")
SMALL_UNITS = {"十": 10, "百": 100, "千": 1000}
LARGE_UNITS = {"亿": 10**8, "万": 10**4}


def chinese_number(text: str) -> Fraction | None:
    """The value of a Chinese numeral ("三万二千", "三分之二", "百分之二十", "一点五"), `None` if it is none."""
    if not CHINESE_NUMBER.fullmatch(text):
        return None
    if text.startswith("负"):
        value = chinese_number(text[1:])
        return None if value is None else -value
    denominator, parts, numerator = text.partition("分之")
    if parts:
        return ratio(chinese_number(numerator), chinese_number(denominator))
    whole, point, decimals = text.partition("点")
    if point:
        return with_decimals(chinese_number(whole), decimals)
    return whole_number(text)


def ratio(numerator: Fraction | None, denominator: Fraction | None) -> Fraction | None:
    return numerator / denominator if numerator is not None and denominator else None


def with_decimals(whole: Fraction | None, decimals: str) -> Fraction | None:
    if whole is None or not decimals or set(decimals) - set(DIGITS):
        return None
    return whole + Fraction(digits_value(decimals), 10 ** len(decimals))


def whole_number(text: str) -> Fraction | None:
    for character, unit in LARGE_UNITS.items():
        high, found, low = text.rpartition(character)
        if found:
            values = whole_number(high or "一"), whole_number(low or "零")
            return None if None in values else Fraction(values[0] * unit + values[1])  # type: ignore[operator]
    if not set(text) & set(SMALL_UNITS):
        return Fraction(digits_value(text)) if text and not set(text) - set(DIGITS) else None
    total, digit = 0, 0
    for character in text:
        if character in SMALL_UNITS:
            total += (digit or 1) * SMALL_UNITS[character]
            digit = 0
        elif character in DIGITS:
            digit = digits_value(character)
        else:
            return None
    return Fraction(total + digit)


def digits_value(digits: str) -> int:
    """The number that digits write one after another, as years are written."""
    return int("".join("2" if digit == "两" else str(int(unicodedata.numeric(digit))) for digit in digits))
