r"""
Process supervision by rule: is the arithmetic that a step writes down right?

It reads GSM8K-style text, with units, money, percentages and `<<3*4=12>>` annotations, and needs no model.
"""

import ast
import operator
import re
from fractions import Fraction


NUMBER = r"(?:\d[\d,]*(?: \d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
OPERAND = rf"[-(\s]*[$€£]?\s*{NUMBER}\s*%?"
UNIT = r"(?:\s+(?!is\b|are\b|was\b|were\b|and\b|so\b|then\b)[A-Za-z]+){0,2}?"
# "of" multiplies after a percentage or a fraction: "20% of 50", but not "6 packages of 3"
# Besides - + * /: multiplication sign, division sign, middle dot, minus sign, en dash
OPERATOR = r"(?:[-+*/\u00d7\u00f7\u00b7\u2212\u2013]|\bx\b|(?<=\d)x(?=\d)|\btimes\b|(?<=%)\s*of\b|(?<=/\d)\s*of\b)"
EXPRESSION = rf"{OPERAND}\)*(?:{UNIT}\)*\s*{OPERATOR}{OPERAND}\)*)*"
LEFT = re.compile(rf"({EXPRESSION}){UNIT}\s*$")
RIGHT = re.compile(rf"\s*({EXPRESSION})")
OPERATION = re.compile(rf"{NUMBER}\s*%?\)*{UNIT}\)*\s*{OPERATOR}")
ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
FLOAT_NOISE = Fraction(1, 10**9)  # calculators write 14.999999999999998
# What is beyond these is no arithmetic that people write, and takes long to read
LONGEST_EXPRESSION = 200  # characters
MOST_EQUATIONS = 50  # in a step


def arithmetic_reward(steps: list[list[str]], **kwargs) -> list[list[float | None]]:
    """
    Step reward: 1 for a step whose equations are all true, 0 for one with a false equation, `None` for one without.

    What the score means: right as far as the arithmetic goes, not whether the step leads to the answer. How it could
    be farmed: by true but useless equations, such as `1 + 1 = 2`; what is no calculation (`x = 5`), and an equation
    that the completion had before, earn nothing. Use it with an outcome reward (`outcome_weight`), and with a credit
    that does not pay for the number of steps (`step_credit="min"` or `"step"`).

    Args:
        steps (`list[list[str]]`):
            The steps of each completion.
        **kwargs:
            Other columns, unused.

    Returns:
        `list[list[float | None]]`: one score a step.
    """
    return [score_completion(texts) for texts in steps]


def score_completion(texts: list[str]) -> list[float | None]:
    seen: set[str] = set()
    scores: list[float | None] = []
    for text in texts:
        new = {equation: verdict for equation, verdict in check_equations(text) if equation not in seen}
        seen |= set(new)
        scores.append(float(all(new.values())) if new else None)
    return scores


def check_equations(text: str) -> list[tuple[str, bool]]:
    """
    The equations in a text, normalized, each with whether it is true.

    An equation has at least one operation on its left. Decimals may be rounded as written (`10 / 3 = 3.33`).
    """
    annotated = ANNOTATION.findall(text)[:MOST_EQUATIONS]
    plain = ANNOTATION.sub("", text)
    signs = [match.start() for match in re.finditer("=", plain)][:MOST_EQUATIONS]
    written = [sides for sign in signs if (sides := sides_of(plain, sign))]
    verdicts = {}
    for left, right in [*annotated, *written]:
        verdict = is_true(left, right)
        if verdict is not None:
            verdicts[f"{normalize(left)}={normalize(right)}"] = verdict
    return list(verdicts.items())


def sides_of(text: str, sign: int) -> tuple[str, str] | None:
    """The expressions that end and begin at an equals sign, if there are."""
    start = max(0, sign - LONGEST_EXPRESSION)
    left = LEFT.search(text[start:sign])
    right = RIGHT.match(text[sign + 1 : sign + 1 + LONGEST_EXPRESSION])
    is_cut_off = left is not None and start > 0 and left.start() == 0
    return None if left is None or right is None or is_cut_off else (left[1], right[1])


def is_true(left: str, right: str) -> bool | None:
    """Whether an equation holds; `None` if its left is no calculation, or either side cannot be read."""
    if not OPERATION.search(left):
        return None
    left_value, right_value = evaluate(left), evaluate(right)
    if left_value is None or right_value is None:
        return None
    decimals = re.search(r"\.(\d+)\s*%?\s*$", right)
    rounding = Fraction(1, 2 * 10 ** len(decimals[1])) if decimals else Fraction(0)
    if right.rstrip().endswith("%"):
        rounding /= 100
    if decimals:
        rounding = max(rounding, FLOAT_NOISE * abs(left_value))
    return abs(left_value - right_value) <= rounding


def normalize(expression: str) -> str:
    """An expression as Python would write it."""
    expression = re.sub(r"(?<=\d),(?=\d)|(?<=\d) (?=\d{3}(?!\d))", "", expression)
    expression = re.sub(r"[$€£,\s]", " ", expression)
    expression = re.sub(r"\b(?:times|of|x)\b|(?<=\d)x(?=\d)|[\u00d7\u00b7]", "*", expression)
    expression = re.sub(r"[\u2212\u2013]", "-", expression.replace("\u00f7", "/"))
    expression = re.sub(r"[A-Za-z]+", " ", expression)
    expression = re.sub(rf"({NUMBER})\s*%", r"(\1/100)", expression)
    return re.sub(r"\s+", "", expression)


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an expression of numbers, `+ - * /` and parentheses, or `None`."""
    text = normalize(expression)
    # a parenthesis that belongs to the sentence around it
    text += ")" * (text.count("(") - text.count(")"))
    text = "(" * (text.count(")") - text.count("(")) + text
    try:
        return evaluate_node(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def evaluate_node(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.get_source_segment(text, node) or "")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate_node(left, text), evaluate_node(right, text))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate_node(operand, text)
    raise ValueError("no arithmetic")
