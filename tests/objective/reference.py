"""Slow float64 versions of the formulas, written from the paper's text alone."""

import math

import numpy as np


def numpy_process_advantages(
    step_rewards, step_ends, num_generations, length, *, scale="group", std_correction=1, eps=1e-4, tolerance=1e-6
):
    """Section 4.1.3 by loops: normalize the flat set of a group's step rewards, then sum those of later steps."""
    every_score = [score for row in step_rewards for score in row if is_score(score)]
    result = np.zeros((len(step_rewards), length))
    for start in range(0, len(step_rewards), num_generations):
        members = range(start, start + num_generations)
        population = np.array([score for i in members for score in step_rewards[i] if is_score(score)], float)
        num_scored = sum(any(is_score(score) for score in step_rewards[i]) for i in members)
        if num_scored < 2 or population.max() - population.min() <= tolerance:
            continue
        divisor = {
            "group": lambda population=population: population.std(ddof=std_correction) + eps,
            "batch": lambda: np.std(np.array(every_score, float), ddof=std_correction) + eps,
            "none": lambda: 1.0,
        }[scale]()
        for i in members:
            for t in range(length):
                result[i, t] = sum(
                    (score - population.mean()) / divisor
                    for score, end in zip(step_rewards[i], step_ends[i], strict=True)
                    if end >= t and is_score(score)
                )
    return result


def is_score(score):
    return score is not None and not math.isnan(score)
