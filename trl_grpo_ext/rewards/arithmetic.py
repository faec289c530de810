r"""
Process supervision by rule: is the arithmetic that a step writes down right?

It reads GSM8K-style text, with units, money, percentages and `<<3*4=12>>` annotations, and needs no model.
"""

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction


NUMBER = r"(?:\d(?:[\d,]*\d)?(?: \d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
OPERAND = rf"[-\u2212(\s]*[$€£]?\s*{NUMBER}(?:\s*%)?"
UNIT = r"(?:\s+(?!is\b|are\b|was\b|were\b|and\b|so\b|then\b)[A-Za-z]+){0,2}?"
# "of" multiplies after a percentage or a fraction: "20% of 50", but not "6 packages of 3"
# Besides - + * /: multiplication sign, division sign, middle dot, minus sign, en dash
OPERATOR = r"(?:[-+*/\u00d7\u00f7\u00b7\u2212\u2013]|\bx\b|(?<=\d)x(?=\d)|\btimes\b|(?<=%)\s*of\b|(?<=/\d)\s*of\b)"
EXPRESSION = rf"{OPERAND}\)*(?:{UNIT}\)*\s*{OPERATOR}{OPERAND}\)*)*"
LEFT = re.compile(rf"({EXPRESSION}){UNIT}\s*$")
RIGHT = re.compile(rf"\s*({EXPRESSION})")
OPERATION = re.compile(rf"{NUMBER}\s*%?\)*{UNIT}\)*\s*{OPERATOR}")
BULLET = re.compile(r"(?m)^\s*[-*+\u2022]\s+")
# What stands at an expression's edge and belongs to it, but cannot be read: variables, powers, roots, products without
# a sign, versions and remainders
GOES_ON_BEFORE = re.compile(r"(?:[\w.)^\u221a](?=\Z)|[-+*/^\u221a\u00d7\u00f7\u00b7\u2212\u2013]\s*\Z)")
GOES_ON_AFTER = re.compile(
    r"[\w(^]|[ \t]*(?:[+*/^\u00d7\u00f7\u00b7]|-\s*[A-Za-z]\b|\d|(?:remainder|rem|r)\b)", re.IGNORECASE
)
NO_UNITS = {"x", "times", "of"}
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
    annotated = [Equation(*sides) for sides in ANNOTATION.findall(text) if max(map(len, sides)) <= LONGEST_EXPRESSION]
    plain = BULLET.sub("", ANNOTATION.sub("", text))
    signs = [match.start() for match in re.finditer("=", plain)][:MOST_EQUATIONS]
    written = [equation for sign in signs if (equation := equation_at(plain, sign))]
    verdicts = {}
    for equation in [*annotated[:MOST_EQUATIONS], *written]:
        verdict = is_true(equation)
        if verdict is not None:
            verdicts[f"{normalize(equation.left)}={normalize(equation.right)}"] = verdict
    return list(verdicts.items())


@dataclass(frozen=True)
class Equation:
    """Two expressions, and whether both are known to count the same thing."""

    left: str
    right: str
    has_one_unit: bool = True


def equation_at(text: str, sign: int) -> Equation | None:
    """The equation at an equals sign, if the expressions there are all that stands at its sides."""
    start = max(0, sign - LONGEST_EXPRESSION)
    before, after = text[start:sign], text[sign + 1 : sign + 1 + LONGEST_EXPRESSION]
    left, right = LEFT.search(before), RIGHT.match(after)
    if left is None or right is None or (start > 0 and left.start() == 0):
        return None
    context, rest = before[: left.start()], after[right.end() :]
    is_attached = context[-1:] and not left[1][0].isspace()
    is_binary_minus = re.match(r"\s*[-\u2212]\s", left[1]) and context.rpartition("\n")[2].strip()
    goes_on = GOES_ON_BEFORE.search(context if is_attached else context.rstrip() + " ")
    if goes_on or is_binary_minus or GOES_ON_AFTER.match(rest):
        return None
    units = {unit(word) for word in re.findall(r"[A-Za-z]+", left[0])} - NO_UNITS
    counted = re.match(r"\s*([A-Za-z]+)", rest)
    return Equation(left[1], right[1], not units or (counted is not None and unit(counted[1]) in units))


def unit(word: str) -> str:
    """A unit's name, in singular or plural."""
    return word.lower().rstrip("s")


def is_true(equation: Equation) -> bool | None:
    """Whether an equation holds; `None` if its left is no calculation, or it cannot be told."""
    left, right = equation.left, equation.right
    numbers, percentages = (len(re.findall(pattern, left)) for pattern in (NUMBER, rf"{NUMBER}\s*%"))
    adds_percentage = re.search(rf"[-+]\s*{NUMBER}\s*%", left) and percentages < numbers
    if not OPERATION.search(left) or adds_percentage:
        return None
    left_value, right_value = evaluate(left), evaluate(right)
    if left_value is None or right_value is None:
        return None
    decimals = re.search(r"\.(\d+)\s*%?\s*$", right)
    is_percentage = right.rstrip().endswith("%")
    rounding = Fraction(0)
    if decimals or is_percentage:
        rounding = Fraction(1, 2 * 10 ** (len(decimals[1]) if decimals else 0)) / (100 if is_percentage else 1)
        rounding = max(rounding, FLOAT_NOISE * abs(left_value))
    holds = abs(left_value - right_value) <= rounding
    # "30 minutes * 4 = 2 hours" may be true
    return None if not holds and not equation.has_one_unit else holds


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
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
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
