"""
The benchmarks of DeepSeekMath (arXiv:2402.03300, 5.2) and how it scores them: its prompts, its order of looking for
answers, Maj@K and Pass@K (Fig. 7).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from .evaluation import bootstrap_interval, maj_at_k, pass_at_k, vote
from .rewards.answer import check_answer
from .rewards.extraction import BOX, boxed_answers, deepseekmath_answers, gold_answer


ENGLISH = "Please reason step by step, and put your final answer within \\boxed{}."
CHINESE = "请通过逐步推理来解答问题，并把最终答案放置于\\boxed{}中。"  # noqa: RUF001
FIGURE_7_K = (1, 4, 8, 16, 32, 64)


class Benchmark(NamedTuple):
    """Where a benchmark is on the Hub, and the instruction that DeepSeekMath puts after its questions."""

    dataset_name: str
    dataset_config: str | None
    instruction: str | None
    split: str = "test"


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", ENGLISH),
    "math": Benchmark("DigitalLearningGmbH/MATH-lighteval", "default", ENGLISH),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, ENGLISH),
    "mgsm_zh": Benchmark("juletxara/mgsm", "zh", CHINESE),
    "cmath": Benchmark("weitianwen/cmath", None, CHINESE),
}


class Judged(NamedTuple):
    """Whether a completion is right, and what it counts as in a vote, `None` where it has no answer."""

    is_right: bool
    ballot: str | None


def judge(text: str, solution: str) -> Judged:
    """
    Judge a completion by the last of its answers, as many as the solution has, in any order.

    An answer that could not be checked in time is wrong, as in DeepSeekMath's evaluation.
    """
    boxed = [answer for answer in boxed_answers(solution) if BOX not in answer]
    golds = boxed or [gold for gold in [gold_answer(solution)] if gold is not None]
    answers = deepseekmath_answers(text)[-max(len(golds), 1) :]
    ballot = "; ".join(sorted(str(vote(answer)) for answer in answers)) or None
    unmatched = list(answers)
    for gold in golds:
        match = next((answer for answer in unmatched if check_answer(answer, gold) == 1.0), None)
        if match is None:
            return Judged(False, ballot)
        unmatched.remove(match)
    return Judged(bool(golds) and not unmatched, ballot)


def score(greedy: Sequence[Judged], samples: Sequence[Sequence[Judged]]) -> dict[str, dict[str, float]]:
    """
    Accuracy by greedy decoding, and Pass@K and Maj@K for each K of Fig. 7 and for the number of samples.

    Args:
        greedy (`Sequence[Judged]` of length P):
            A completion of each problem.
        samples (`Sequence[Sequence[Judged]]` of shape (P, N)):
            Samples of each, maybe none. Maj@K is the mean over their groups of K.

    Returns:
        `dict[str, dict[str, float]]`: of each metric its `value`, and `low` and `high` of the 95 % interval.
    """
    metrics = {"greedy": torch.tensor([float(completion.is_right) for completion in greedy])}
    num_samples = len(samples[0])
    correct = torch.tensor([[sample.is_right for sample in row] for row in samples])
    ballots = [[sample.ballot for sample in row] for row in samples]
    for k in sorted({k for k in (*FIGURE_7_K, num_samples) if 0 < k <= num_samples}):
        groups = range(0, num_samples - k + 1, k)
        votes = [
            maj_at_k([row[start : start + k] for row in ballots], correct[:, start : start + k], k) for start in groups
        ]
        metrics[f"maj@{k}"] = torch.stack(votes).mean(0)
        metrics[f"pass@{k}"] = pass_at_k(correct, k)
    return {name: with_interval(values) for name, values in metrics.items()}


def with_interval(values: torch.Tensor) -> dict[str, float]:
    low, high = bootstrap_interval(values)
    return {"value": values.mean().item(), "low": low, "high": high}


def summarize(rows: Dataset) -> dict[str, Any]:
    """
    Score the completions of a benchmark.

    Args:
        rows ([`~datasets.Dataset`]):
            Columns `solution`, `greedy` and `greedy_is_truncated`, and `samples`, a list of texts.

    Returns:
        `dict`: the metrics of [`score`], `unparsed` and `truncated` (shares of the greedy completions), and
        `num_problems`.
    """
    greedy = [judge(row["greedy"], row["solution"]) for row in rows]
    samples = [[judge(text, row["solution"]) for text in row["samples"]] for row in rows]
    return {
        **score(greedy, samples),
        "unparsed": sum(completion.ballot is None for completion in greedy) / len(rows),
        "truncated": sum(rows["greedy_is_truncated"]) / len(rows),
        "num_problems": len(rows),
    }
