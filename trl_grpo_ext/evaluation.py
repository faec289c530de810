"""
Greedy accuracy, Pass@K and Maj@K of a policy on problems with a known answer.

Pass@K is the share of problems that at least one of K samples solves, Maj@K the share solved by the answer most of K
samples agree on. DeepSeekMath (arXiv:2402.03300, 5.2.2 and Fig. 7) tells by them whether training made right answers
possible or only more frequent.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.data_utils import maybe_apply_chat_template

from .batching import batched, in_eval_mode
from .generation import generate_texts, generation_config, sampling_config
from .rewards.answer import check_answer
from .rewards.extraction import final_answer, gold_answer
from .rewards.notation import as_number


DRAWS_AT_ONCE = 500  # of thousands of problems each


def pass_at_k(correct: torch.Tensor, k: int) -> torch.Tensor:
    r"""
    Unbiased estimate of the probability that at least one of k samples is right: \( 1 - \binom{N-c}{k}/\binom{N}{k} \)
    with c right samples of N (Chen et al., arXiv:2107.03374, Eq. 1).

    Args:
        correct (`torch.Tensor` of shape (P, N)):
            Whether each of a problem's N samples is right.
        k (`int`):
            Number of samples drawn, 1 to N.

    Returns:
        `torch.Tensor` of shape (P,) in float32.
    """
    num_samples = check_k(k, correct)
    wrong = (num_samples - correct.sum(1)).tolist()
    return torch.tensor([1 - comb(count, k) / comb(num_samples, k) for count in wrong])


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: torch.Tensor, k: int) -> torch.Tensor:
    """
    Whether the most frequent answer of the first k samples is right.

    A sample without an answer does not vote. Answers that tie share the vote: with one of two right, the result is
    0.5.

    Args:
        answers (`Sequence[Sequence[str | None]]` of shape (P, N)):
            Final answer of each sample, `None` where there is none.
        correct (`torch.Tensor` of shape (P, N)):
            Whether each sample is right.
        k (`int`):
            Number of samples that vote, 1 to N.

    Returns:
        `torch.Tensor` of shape (P,) in float32.
    """
    check_k(k, correct)
    results = []
    for row, row_correct in zip(answers, correct.tolist(), strict=True):
        votes = Counter(answer for answer in row[:k] if answer is not None)
        right = {answer for answer, is_right in zip(row[:k], row_correct[:k], strict=True) if is_right}
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        results.append(sum(answer in right for answer in winners) / max(len(winners), 1))
    return torch.tensor(results)


def check_k(k: int, correct: torch.Tensor) -> int:
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"`k` is {k}, but must be between 1 and the number of samples a problem, {num_samples}.")
    return num_samples


def confidence_interval(accuracy: float, num_problems: int) -> tuple[float, float]:
    """95 % interval of an accuracy over independent problems (Wilson's score interval)."""
    z = 1.96
    denominator = 1 + z**2 / num_problems
    center = (accuracy + z**2 / (2 * num_problems)) / denominator
    half_width = z / denominator * sqrt(accuracy * (1 - accuracy) / num_problems + z**2 / (4 * num_problems**2))
    return center - half_width, center + half_width


def bootstrap_interval(values: torch.Tensor, num_resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """
    95 % interval of a mean over problems, from means over problems drawn again with replacement.

    Args:
        values (`torch.Tensor` of shape (P,)):
            A value of each problem, such as its Pass@K.
        num_resamples (`int`, *optional*, defaults to `10000`):
            Number of draws.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `tuple[float, float]`: the 2.5th and the 97.5th percentile (Efron & Tibshirani, 1993, chapter 13).
    """
    generator = torch.Generator().manual_seed(seed)
    means = []
    for draws in batched(list(range(num_resamples)), DRAWS_AT_ONCE):
        drawn = torch.randint(len(values), (len(draws), len(values)), generator=generator)
        means.append(values.float()[drawn].mean(1))
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def evaluate_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    *,
    num_samples: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    seed: int = 0,
) -> dict[str, float]:
    """
    Evaluate a policy by greedy decoding and by sampling.

    Problems are shared out among the processes; all of them return the same result. Each makes as many batches, for
    those of a sharded model wait on each other.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The policy.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        dataset ([`~datasets.Dataset`]):
            Columns `prompt`, plain or conversational, and `solution`.
        num_samples (`int`, *optional*, defaults to `8`):
            Number of samples a problem, the K of Maj@K and Pass@K.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        max_new_tokens (`int`, *optional*, defaults to `256`):
            Longest completion, in tokens.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of completions generated at once on a process.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling. The random state of the caller is left as it was.

    Returns:
        `dict[str, float]`:
            `greedy`, `pass@1`, `maj@K` and `pass@K`, in 0 to 1, and `num_problems`.
    """
    state = PartialState()
    prompts = [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in dataset["prompt"]]
    problems = list(zip(prompts, map(gold_answer, dataset["solution"]), strict=True))
    greedy = generation_config(model, tokenizer, max_new_tokens, do_sample=False)
    sampling = sampling_config(model, tokenizer, max_new_tokens, temperature)
    with in_eval_mode(model), torch.random.fork_rng(), state.split_between_processes(problems) as local_problems:
        torch.manual_seed(seed + state.process_index)
        share = -(-len(problems) // state.num_processes)
        filled = local_problems + problems[:1] * (share - len(local_problems))
        greedy_answers = answer_problems(model, tokenizer, filled, greedy, 1, batch_size)[: len(local_problems)]
        sampled_answers = answer_problems(model, tokenizer, filled, sampling, num_samples, batch_size)
    greedy_answers = gather_object(greedy_answers)
    sampled_answers = gather_object(sampled_answers[: len(local_problems)])
    correct = torch.tensor([answers.correct for answers in sampled_answers])
    return {
        "greedy": torch.tensor([answers.correct for answers in greedy_answers]).float().mean().item(),
        "pass@1": pass_at_k(correct, 1).mean().item(),
        f"maj@{num_samples}": maj_at_k([a.answers for a in sampled_answers], correct, num_samples).mean().item(),
        f"pass@{num_samples}": pass_at_k(correct, num_samples).mean().item(),
        "num_problems": len(problems),
    }


@dataclass(frozen=True)
class ProblemAnswers:
    """Final answers to one problem, and whether each is right."""

    answers: list[str | None]
    correct: list[bool]


def answer_problems(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[tuple[str, str | None]],
    config: GenerationConfig,
    num_samples: int,
    batch_size: int,
) -> list[ProblemAnswers]:
    """Answer each (prompt text, gold answer) `num_samples` times."""
    prompts = [prompt for prompt, _ in problems for _ in range(num_samples)]
    answers = [final_answer(text) for text in generate_texts(model, tokenizer, prompts, config, batch_size)]
    return [
        ProblemAnswers(list(map(vote, group)), [check_answer(answer, gold) == 1.0 for answer in group])
        for (_, gold), group in zip(problems, batched(answers, num_samples), strict=True)
    ]


def vote(answer: str | None) -> str | None:
    """What an answer is counted as in a majority vote: numbers by their value, however they are written."""
    value = as_number(answer) if answer is not None else None
    return answer if value is None else str(value)
