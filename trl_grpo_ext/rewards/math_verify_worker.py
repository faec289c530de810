"""
The process in which math-verify compares answers: run as a script, it reads and writes lines of JSON.

An alarm that needs no interpreter ends it where a comparison takes too long, so that a power tower, which holds the
interpreter for ever, cannot hold the training. Whoever asked sees the process end.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

from math_verify import parse, verify
from sympy import Eq, Expr, N, simplify


ROUNDED_TO_ZERO = 1e-4
RELATIVE_TOLERANCE = 1e-6


def same_mathematics(answer: str, gold: str) -> bool:
    """Whether math-verify takes two answers for the same, and rightly so."""
    # It reads them only if they are marked as mathematics
    parsed_answer, parsed_gold = (parse(f"${text}$", parsing_timeout=None) for text in (answer, gold))
    if not verify(parsed_gold, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return not (says_nothing(parsed_answer) or says_nothing(parsed_gold)) and not differ(parsed_answer, parsed_gold)


def says_nothing(parsed: list) -> bool:
    """Whether an answer is an equation that is always true, such as 0 = 0, which equals any other in math-verify."""
    equation = parsed[0]
    if not isinstance(equation, Eq):
        return False
    sides = equation.args
    return sides[0] == sides[1] or (
        all(isinstance(side, Expr) for side in sides) and simplify(sides[0] - sides[1]) == 0
    )


def differ(parsed_answer: list, parsed_gold: list) -> bool:
    """Whether two small numbers are far from equal, though math-verify rounds their difference to 0."""
    numbers = parsed_answer[0], parsed_gold[0]
    if not all(isinstance(number, Expr) and number.is_number for number in numbers):
        return False
    answer, gold = (N(number.doit()) for number in numbers)  # math-verify leaves 25% as 25 * (1/100)
    return bool(abs(gold) < ROUNDED_TO_ZERO) and bool(abs(answer - gold) > RELATIVE_TOLERANCE * abs(gold))


@contextlib.contextmanager
def ends_after(seconds: float, nowhere: TextIO) -> Iterator[None]:
    """Within it the process ends after some seconds."""
    if not hasattr(signal, "setitimer"):  # Windows; where there is an alarm it is better, as a dump may crash
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        yield
        faulthandler.cancel_dump_traceback_later()
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whoever started this may have ignored it
    replies = sys.stdout
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        same_mathematics("x + 1", "1 + x")  # what is slow the first time is no fault of the first question
        for line in sys.stdin:
            answer, gold, seconds = json.loads(line)
            with ends_after(seconds, nowhere):
                verdict = bool(same_mathematics(answer, gold))
            print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
