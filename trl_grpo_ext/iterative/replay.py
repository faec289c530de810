"""
From rollouts to what a reward model is trained on: pairs or labelled steps, mixed with a share of history.

Pure functions, deterministic by their generator.
"""

import json
import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from .rollouts import Rollout


Example = TypeVar("Example")


def question_key(prompt: str | list) -> str:
    """What tells questions apart."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def is_held_out(prompt: str | list, share: float) -> bool:
    """Whether a question belongs to the slice that no reward model is ever trained on, the same in every run."""
    return zlib.crc32(question_key(prompt).encode()) / 2**32 < share


def by_question(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each question, in the order in which questions first occur."""
    questions: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        questions[question_key(rollout.prompt)].append(rollout)
    return list(questions.values())


def preference_pairs(rollouts: Sequence[Rollout], rng: random.Random) -> list[tuple[Rollout, Rollout]]:
    """
    Pairs of a right and a wrong output of the same question.

    Each output is in one pair at most. A question whose outputs are all right, all wrong or not verified has no pair
    and teaches nothing.

    Args:
        rollouts (`Sequence[Rollout]`):
            Verified rollouts.
        rng (`random.Random`):
            Chooses who is paired with whom.

    Returns:
        `list[tuple[Rollout, Rollout]]`: (right, wrong).
    """
    pairs: list[tuple[Rollout, Rollout]] = []
    for outputs in by_question(rollouts):
        right = [output for output in outputs if output.verified == 1.0]
        wrong = [output for output in outputs if output.verified == 0.0]
        count = min(len(right), len(wrong))
        pairs += zip(rng.sample(right, count), rng.sample(wrong, count), strict=True)
    return pairs


def mix_with_replay(
    new: Sequence[Example], history: Sequence[Example], replay_ratio: float, rng: random.Random
) -> list[Example]:
    """
    New examples with a share of historical ones (arXiv:2402.03300, 4.1.4: "10% of historical data").

    The paper does not say what its 10 % is of; here it is of the mixture.

    Args:
        new (`Sequence`):
            All of them are in the result.
        history (`Sequence`):
            Drawn from without replacement.
        replay_ratio (`float`):
            Share of the result that is history, in 0 to 1, as far as there is so much.
        rng (`random.Random`):
            Draws and shuffles.

    Returns:
        `list`: the mixture, shuffled.
    """
    wanted = round(replay_ratio / (1 - replay_ratio) * len(new))
    mixture = [*new, *rng.sample(list(history), min(wanted, len(history)))]
    rng.shuffle(mixture)
    return mixture
