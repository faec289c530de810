"""How good step scores are: accuracy, first errors found (ProcessBench, arXiv:2412.06559), calibration."""

from collections.abc import Sequence

import numpy as np


def step_metrics(scores: Sequence[Sequence[float]], labels: Sequence[Sequence[float]]) -> dict[str, float]:
    """
    Compare the scores of completions' steps with their labels.

    Args:
        scores (`Sequence[Sequence[float]]`):
            Probability that each step is right, one list a completion.
        labels (`Sequence[Sequence[float]]`):
            Labels in 0 to 1; a step counts as right from 0.5 on.

    Returns:
        `dict[str, float]`:
            `accuracy` over steps; `first_error_f1`, the harmonic mean of the accuracies at telling the first wrong
            step of completions that have one (`first_error_accuracy`) and at finding none in the others
            (`no_error_accuracy`); `calibration_error`, the expected difference between score and label over ten bins
            of the score; `base_rate`, the accuracy of always saying what most steps are.
    """
    flat_scores = np.array([score for row in scores for score in row], float)
    flat_labels = np.array([label for row in labels for label in row], float)
    is_right = flat_labels >= 0.5
    with_error: list[bool] = []
    without_error: list[bool] = []
    for row_scores, row_labels in zip(scores, labels, strict=True):
        true_error = first_error(row_labels)
        (with_error if true_error >= 0 else without_error).append(first_error(row_scores) == true_error)
    found, none_found = (float(np.mean(group)) if group else float("nan") for group in (with_error, without_error))
    return {
        "accuracy": float(np.mean((flat_scores >= 0.5) == is_right)),
        "first_error_f1": harmonic_mean(found, none_found),
        "first_error_accuracy": found,
        "no_error_accuracy": none_found,
        "calibration_error": calibration_error(flat_scores, flat_labels),
        "base_rate": float(max(is_right.mean(), 1 - is_right.mean())),
    }


def first_error(row: Sequence[float]) -> int:
    """Index of the first step that is not right, -1 if there is none."""
    return next((index for index, value in enumerate(row) if value < 0.5), -1)


def harmonic_mean(first: float, second: float) -> float:
    return 2 * first * second / (first + second) if first + second else 0.0


def calibration_error(scores: np.ndarray, labels: np.ndarray, num_bins: int = 10) -> float:
    """Mean over steps of the gap between mean score and mean label of the step's bin."""
    bins = np.minimum((scores * num_bins).astype(int), num_bins - 1)
    gaps = [abs((scores[bins == b] - labels[bins == b]).sum()) for b in np.unique(bins)]
    return float(sum(gaps) / len(scores))
