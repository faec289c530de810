"""
Step labels by sampling, after Math-Shepherd (arXiv:2312.08935): a step is worth its chance of coming out right.

From the ids of each prefix of a solution the policy writes continuations, and the answers of these are checked. Labels
made so estimate value, not correctness: a wrong step that the policy recovers from has a good label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..batching import batched
from ..choices import check_at_least_one, unknown_choice
from ..generation import Sampler
from ..rewards.answer import check_answer
from ..rewards.extraction import final_answer, gold_answer
from ..steps import Steps


MODES = ("soft", "hard", "first_error")


@dataclass(frozen=True)
class Solution:
    """
    A solution to label.

    Args:
        prompt_ids (`list[int]`):
            Ids of the prompt, as the policy was asked.
        completion_ids (`list[int]`):
            Ids of the solution, as sampled.
        steps ([`~trl_grpo_ext.steps.Steps`]):
            Its steps.
        gold (`str`):
            The right answer.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    steps: Steps
    gold: str

    def prefix(self, step: int) -> tuple[int, ...]:
        """Ids of the prompt and of the solution up to and including a step."""
        return (*self.prompt_ids, *self.completion_ids[: self.steps.ends[step] + 1])

    def text_until(self, step: int) -> str:
        return "".join(self.steps.texts[: step + 1])


class StepLabeller:
    """
    Labels the steps of solutions by how continuations from them end.

    Args:
        sample (`Callable[[list[list[int]]], list[list[int]]]`):
            Writes one continuation for each list of ids: [`~trl_grpo_ext.generation.model_sampler`], or
            [`GRPOExtTrainer`]'s `sample_continuations`, by which the trainer's own generation, vLLM included, is used.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the ids.
        num_continuations (`int`, *optional*, defaults to `8`):
            Continuations of each prefix, Math-Shepherd's N. A prefix that solutions share is continued once.
        mode (`str`, *optional*, defaults to `"soft"`):
            `"soft"`: a step's label is the share of continuations that come right. `"hard"`: 1 if any does, else 0.
            `"first_error"`: hard labels up to the first step from which none comes right, found by binary search, and
            `None` after it (OmegaPRM, arXiv:2406.06592): fewer continuations, of wrong solutions only; the steps of
            right ones are all right.

    Raises:
        `ValueError`: if `mode` is unknown or `num_continuations` below 1.
    """

    def __init__(
        self, sample: Sampler, tokenizer: PreTrainedTokenizerBase, num_continuations: int = 8, mode: str = "soft"
    ):
        if mode not in MODES:
            raise unknown_choice("mode", mode, MODES)
        check_at_least_one(num_continuations=num_continuations)
        self.sample = sample
        self.tokenizer = tokenizer
        self.num_continuations = num_continuations
        self.mode = mode
        self.num_sampled = 0

    def __call__(self, solutions: Sequence[Solution]) -> list[list[float | None]]:
        """
        Label solutions.

        Args:
            solutions (`Sequence[Solution]`):
                The solutions; prefixes that they share are sampled from once.

        Returns:
            `list[list[float | None]]`: one label a step. The last one says whether the answer is right.
        """
        if self.mode == "first_error":
            return self._label_first_errors(solutions)
        queries = [(s, step) for s in solutions for step in range(len(s.steps.ends) - 1)]
        values = self._values(queries)
        labels: list[list[float | None]] = []
        for solution in solutions:
            row = [values[solution.prefix(step)] for step in range(len(solution.steps.ends) - 1)]
            if self.mode == "hard":
                row = [float(value > 0) for value in row]
            labels.append([*row, is_right(solution)])
        return labels

    def _label_first_errors(self, solutions: Sequence[Solution]) -> list[list[float | None]]:
        # The first step of value 0 lies in [low, high] of each wrong solution; the last one surely is such a step.
        ranges = {i: (0, len(s.steps.ends) - 1) for i, s in enumerate(solutions) if not is_right(s)}
        while active := {i: (low, high) for i, (low, high) in ranges.items() if low < high}:
            middles = {i: (low + high) // 2 for i, (low, high) in active.items()}
            values = self._values([(solutions[i], middle) for i, middle in middles.items()])
            for i, middle in middles.items():
                low, high = active[i]
                comes_right = values[solutions[i].prefix(middle)] > 0
                ranges[i] = (middle + 1, high) if comes_right else (low, middle)
        labels: list[list[float | None]] = []
        for i, solution in enumerate(solutions):
            num_steps = len(solution.steps.ends)
            first_error = ranges[i][0] if i in ranges else num_steps
            labels.append([1.0 if k < first_error else 0.0 if k == first_error else None for k in range(num_steps)])
        return labels

    def _values(self, queries: Sequence[tuple[Solution, int]]) -> dict[tuple[int, ...], float]:
        """Share of right continuations of each distinct prefix."""
        distinct = {solution.prefix(step): (solution, step) for solution, step in queries}
        prefixes = [list(prefix) for prefix in distinct for _ in range(self.num_continuations)]
        continuations = self.sample(prefixes) if prefixes else []
        self.num_sampled += len(continuations)
        texts = self.tokenizer.batch_decode(continuations, skip_special_tokens=True)
        values = {}
        for (prefix, (solution, step)), group in zip(
            distinct.items(), batched(texts, self.num_continuations), strict=True
        ):
            written = solution.text_until(step)
            values[prefix] = sum(answers(written + text, solution.gold) for text in group) / len(group)
        return values


def answers(text: str, gold: str) -> float:
    """1 if a text's final answer is the gold one, else 0."""
    return float(check_answer(final_answer(text), gold_answer(gold)) == 1.0)


def is_right(solution: Solution) -> float:
    return answers("".join(solution.steps.texts), solution.gold)
