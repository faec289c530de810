r"""
A second, easier embedded task for small pretrained models: sums of three digits, one addition a line.

    3 + 4 + 2

    3 + 4 = 7
    7 + 2 = 9
    The answer is \boxed{9}.

An example in the conversation shows the form, which a pretrained model follows now and then from the start.
"""

from itertools import product

from datasets import Dataset, DatasetInfo

from .word_problems import Problem, problem_row, reference_solution


EXAMPLE = Problem(2, (("+", 6), ("+", 3)))


def make_sums_dataset(num_problems: int, *, held_out: bool = False, seed: int = 0) -> Dataset:
    """
    Make a prompt/answer data set of distinct sums, as [`make_dataset`] does of word problems.

    There are 729 sums, of which 1 in 10 is held out; fewer rows than asked for are made where there are no more.
    """
    problems = [
        Problem(first, (("+", second), ("+", third))) for first, second, third in product(range(1, 10), repeat=3)
    ]
    example = [
        {"role": "system", "content": "Add step by step."},
        {"role": "user", "content": question(EXAMPLE)},
        {"role": "assistant", "content": reference_solution(EXAMPLE)},
    ]
    rows = [
        problem_row(problem, [*example, {"role": "user", "content": question(problem)}])
        for problem in problems
        if problem.is_held_out == held_out and problem != EXAMPLE
    ]
    info = DatasetInfo(description="sums made by `trl_grpo_ext.tasks.make_sums_dataset`")
    shuffled = Dataset.from_list(rows, info=info).shuffle(seed=seed)
    return shuffled.select(range(min(num_problems, len(rows))))


def question(problem: Problem) -> str:
    return " + ".join(map(str, (problem.start, *(operand for _, operand in problem.operations))))
