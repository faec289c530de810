r"""
The embedded task: short English word problems whose every line of working can be checked by rule.

A problem starts from a number of things and changes it three or four times:

    Mia has 12 apples. Mia buys 7 more. Mia loses 5. Then the number doubles. How many apples are there now?

and its reference solution has one equation a line, then the answer:

    12 + 7 = 19
    19 - 5 = 14
    14 * 2 = 28
    The answer is \boxed{28}.

The left operand of every line is the running total, so a slip makes all later lines wrong: a line is right exactly as
long as the final answer can still come out right.
"""

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from datasets import Dataset, DatasetInfo


LARGEST_TOTAL = 99
NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Sam", "Eva", "Max")
ITEMS = ("apples", "books", "coins", "cards", "shells", "stamps", "pens", "nuts")
TEMPLATES = {
    "+": ("{name} buys {n} more.", "{name} finds {n} more.", "{name} gets {n} from {friend}.", "{friend} adds {n}."),
    "-": ("{name} loses {n}.", "{name} sells {n}.", "{name} gives {n} to {friend}.", "{friend} takes {n}."),
    ("*", 2): ("Then the number doubles.", "{friend} doubles the number."),
    ("*", 3): ("Then the number triples.", "{friend} triples the number."),
    ("/", 2): ("{name} keeps only half.", "Half of them get lost."),
}
ANSWER_LINE = r"The answer is \boxed{{{answer}}}."
ANSWER_PATTERN = re.compile(r"The answer is \\boxed\{(\d+)\}\.")


@dataclass(frozen=True)
class Problem:
    """
    A chain of operations on a running total.

    Args:
        start (`int`):
            The number at the beginning.
        operations (`tuple[tuple[str, int], ...]`):
            Pairs of an operator, one of `+ - * /`, and its right operand, in the order they are applied.
    """

    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> list[int]:
        """The running total at the start and after each operation."""
        totals = [self.start]
        for operator, operand in self.operations:
            totals.append(apply_operation(totals[-1], operator, operand))
        return totals

    @property
    def equations(self) -> list[str]:
        """The reference working, one equation an operation."""
        return [
            format_equation(left, operator, operand, right)
            for (operator, operand), (left, right) in zip(self.operations, pairwise(self.totals), strict=True)
        ]

    @property
    def is_held_out(self) -> bool:
        """Whether the problem belongs to the held-out split. Depends on the numbers alone, never on the wording."""
        key = f"{self.start}{self.operations}".encode()
        return zlib.crc32(key) % 10 == 0


def apply_operation(total: int, operator: str, operand: int) -> int:
    match operator:
        case "+":
            return total + operand
        case "-":
            return total - operand
        case "*":
            return total * operand
        case "/":
            return total // operand
    raise ValueError(f"`operator` is {operator!r}, but must be one of '+', '-', '*' and '/'.")


def format_equation(left: int, operator: str, operand: int, right: int) -> str:
    return f"{left} {operator} {operand} = {right}"


def sample_problem(rng: random.Random) -> Problem:
    """Draw a problem whose running total stays within 1 and 99."""
    start = rng.randint(2, 30)
    total, operations = start, []
    for _ in range(rng.choice((3, 4))):
        candidates = [("+", rng.randint(2, 9)), ("-", rng.randint(2, 9)), ("*", 2), ("*", 3), ("/", 2)]
        possible = [
            (operator, operand)
            for operator, operand in candidates
            if (operator != "/" or total % operand == 0)
            and 1 <= apply_operation(total, operator, operand) <= LARGEST_TOTAL
        ]
        operator, operand = rng.choice(possible)
        total = apply_operation(total, operator, operand)
        operations.append((operator, operand))
    return Problem(start, tuple(operations))


def sample_problems(num_problems: int, *, held_out: bool, seed: int) -> Iterator[Problem]:
    """Yield distinct problems of one split: no problem of the held-out split is ever yielded for training."""
    rng = random.Random(seed)
    seen: set[Problem] = set()
    while len(seen) < num_problems:
        problem = sample_problem(rng)
        if problem.is_held_out == held_out and problem not in seen:
            seen.add(problem)
            yield problem


def word_problem(problem: Problem, rng: random.Random) -> str:
    """Tell a problem in English, with random names, things and turns of phrase."""
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    sentences = [f"{name} has {problem.start} {item}."]
    for operator, operand in problem.operations:
        templates = TEMPLATES.get(operator) or TEMPLATES[operator, operand]
        sentences.append(rng.choice(templates).format(name=name, friend=friend, n=operand))
    sentences.append(f"How many {item} are there now?")
    return " ".join(sentences)


def reference_solution(problem: Problem) -> str:
    return "\n".join([*problem.equations, ANSWER_LINE.format(answer=problem.totals[-1])])


def imperfect_solution(problem: Problem, rng: random.Random, slip_rate: float) -> str:
    """
    Solve a problem as a careless tutor does: each written result is off with probability `slip_rate`.

    The tutor goes on from the wrong number, as people do. A policy that learned from such solutions knows the method
    and slips at random, which leaves reinforcement learning something to remove.
    """
    total, lines = problem.start, []
    for operator, operand in problem.operations:
        result = apply_operation(total, operator, operand)
        if rng.random() < slip_rate:
            result = max(0, result + rng.choice((-10, -2, -1, 1, 2, 10)))
        lines.append(format_equation(total, operator, operand, result))
        total = result
    return "\n".join([*lines, ANSWER_LINE.format(answer=total)])


def make_dataset(num_problems: int, *, held_out: bool = False, seed: int = 0) -> Dataset:
    """
    Make a prompt/answer data set of distinct word problems.

    Args:
        num_problems (`int`):
            Number of rows.
        held_out (`bool`, *optional*, defaults to `False`):
            Which split to draw from. The two splits share no problem, in whatever words it is told.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw.

    Returns:
        [`~datasets.Dataset`]:
            Columns `prompt` (conversational), `solution` (the answer) and `equations` (the reference working).
    """
    wording = random.Random(f"wording {seed}")
    rows = [
        problem_row(problem, [{"role": "user", "content": word_problem(problem, wording)}])
        for problem in sample_problems(num_problems, held_out=held_out, seed=seed)
    ]
    info = DatasetInfo(description="word problems made by `trl_grpo_ext.tasks.make_dataset`")
    return Dataset.from_list(rows, info=info)


def problem_row(problem: Problem, prompt: list[dict[str, str]]) -> dict:
    """A row of a data set whose completions [`working_reward`] can score."""
    return {"prompt": prompt, "solution": str(problem.totals[-1]), "equations": problem.equations}


def working_reward(
    steps: list[list[str]], equations: list[list[str]], solution: list[str], **kwargs
) -> list[list[float]]:
    r"""
    Step reward: 1 for a line that is the one needed at its place, 0 for any other.

    Line k of a completion must be the k-th equation of the reference working, and the last line must box the right
    answer. What the score means: as every equation starts from the running total, a line scores 1 exactly when the
    answer can still come out right after it, the hard label that Math-Shepherd (arXiv:2312.08935) estimates by
    sampling. How it could be farmed: not by empty, repeated or trivial lines, since each place has one right line and
    there are only as many places as the problem has operations; not by stopping early, since the last line is then no
    right answer.

    Args:
        steps (`list[list[str]]`):
            The lines of each completion.
        equations (`list[list[str]]`):
            The reference working of each completion's problem.
        solution (`list[str]`):
            The right answer of each completion's problem.
        **kwargs:
            Other columns, unused.

    Returns:
        `list[list[float]]`:
            One score a line.
    """
    return [
        [*equation_scores(lines[:-1], reference), float(boxed_answer(lines[-1]) == answer)]
        for lines, reference, answer in zip(steps, equations, solution, strict=True)
    ]


def equation_scores(lines: list[str], reference: list[str]) -> list[float]:
    return [float(line.strip() == needed) for line, needed in zip_longest(lines, reference, fillvalue="")][
        : len(lines)
    ]


def boxed_answer(line: str) -> str | None:
    match = ANSWER_PATTERN.fullmatch(line.strip())
    return match.group(1) if match else None
