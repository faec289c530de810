"""How good an outcome reward model is, against outputs that a rule has verified."""

from collections.abc import Sequence

import numpy as np

from ..prm.metrics import calibration_error


def pair_metrics(
    scores: Sequence[float | None], verified: Sequence[float | None], questions: Sequence[str]
) -> dict[str, float]:
    """
    Compare scores with a verifier's verdicts.

    Args:
        scores (`Sequence[float | None]` of length N):
            Scores of a reward model, as log-odds of being the better one of a pair.
        verified (`Sequence[float | None]` of length N):
            1 for a right output, 0 for a wrong one, `None` for one that could not be verified, which is left out.
        questions (`Sequence[str]` of length N):
            The question of each output.

    Returns:
        `dict[str, float]`:
            `pair_accuracy`, the share of all pairs of a right and a wrong output of one question that are ordered
            rightly (a tie counts half); `agreement`, the same over pairs of any two questions (the area under the ROC
            curve); `calibration_error`, the expected gap between the probability that a pair is ordered rightly and
            how often it is; `num_pairs`. NaN where there is no pair.
    """
    known = [
        (score, verdict, question)
        for score, verdict, question in zip(scores, verified, questions, strict=True)
        if score is not None and verdict is not None
    ]
    right = [(score, question) for score, verdict, question in known if verdict == 1.0]
    wrong = [(score, question) for score, verdict, question in known if verdict == 0.0]
    if not right or not wrong:
        return dict.fromkeys(("pair_accuracy", "agreement", "calibration_error"), float("nan")) | {"num_pairs": 0.0}
    margins = np.subtract.outer([score for score, _ in right], [score for score, _ in wrong])
    is_pair = np.equal.outer([question for _, question in right], [question for _, question in wrong])
    wins = (margins > 0) + 0.5 * (margins == 0)
    return {
        "pair_accuracy": float(wins[is_pair].mean()) if is_pair.any() else float("nan"),
        "agreement": float(wins.mean()),
        "calibration_error": pair_calibration_error(margins[is_pair]) if is_pair.any() else float("nan"),
        "num_pairs": float(is_pair.sum()),
    }


def pair_calibration_error(margins: np.ndarray) -> float:
    """Calibration of the sigmoid of a margin as the probability that a pair is ordered as the margin says."""
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    is_right = (margins > 0) + 0.5 * (margins == 0)
    return calibration_error(confidence, is_right)


def unexplained_reward(
    rewards: Sequence[float], verified: Sequence[float], right_reward: float, wrong_reward: float
) -> float:
    """
    By how much a mean reward is above what the verified accuracy explains: what reward hacking looks like.

    Args:
        rewards (`Sequence[float]` of length N):
            Rewards of a reward model.
        verified (`Sequence[float]` of length N):
            1 for a right output, 0 for a wrong one.
        right_reward, wrong_reward (`float`):
            Mean rewards of right and of wrong outputs when the reward model was last trained.

    Returns:
        `float`, in units of the distance between these two means.
    """
    accuracy = float(np.mean(verified))
    expected = accuracy * right_reward + (1 - accuracy) * wrong_reward
    return (float(np.mean(rewards)) - expected) / max(abs(right_reward - wrong_reward), 1e-6)
