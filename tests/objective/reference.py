"""Slow float64 versions of the formulas, written from the papers' text alone, by loops."""

import math
from itertools import pairwise

import numpy as np


def numpy_outcome_advantages(rewards, num_generations, **options):
    one_step = [[reward] for reward in rewards]
    return numpy_process_advantages(one_step, [[0]] * len(rewards), num_generations, 1, **options)[:, 0]


def numpy_credited_advantages(
    step_rewards,
    step_ends,
    num_generations,
    length,
    *,
    credit="sum_to_go",
    baseline="mean",
    scale="group",
    std_correction=1,
    eps=1e-4,
    tolerance=1e-6,
):
    """Section 4.1.3: normalize the flat set of a group's step rewards, then credit each token with those to come."""

    def flat(rows):
        return np.array([score for i in rows for score in step_rewards[i] if is_score(score)], float)

    def all_same(population):
        return len(population) == 0 or population.max() - population.min() <= tolerance

    everyone = range(len(step_rewards))
    batch = flat(everyone)
    result = np.zeros((len(step_rewards), length))
    for start in range(0, len(step_rewards), num_generations):
        members = range(start, start + num_generations)
        group = flat(members)
        group_all_same = all_same(group) or sum(len(flat([i])) > 0 for i in members) < 2
        if baseline in ("mean", "leave_one_out") and group_all_same:
            continue
        if baseline == "batch" and all_same(batch):
            continue
        divisor = 1.0
        if scale == "group" and not group_all_same:
            divisor = group.std(ddof=std_correction) + eps
        if scale == "batch" and not all_same(batch):
            divisor = batch.std(ddof=std_correction) + eps
        for i in members:
            others = flat([j for j in members if j != i])
            subtracted = {
                "mean": lambda group=group: group.mean(),
                "leave_one_out": lambda others=others: others.mean() if len(others) else 0.0,
                "batch": lambda: batch.mean(),
                "none": lambda: 0.0,
            }[baseline]()
            normalized = [(score - subtracted) / divisor if is_score(score) else None for score in step_rewards[i]]
            for t in range(length):
                current = [k for k, end in enumerate(step_ends[i]) if end >= t]
                if current:
                    result[i, t] = numpy_credit(normalized, current[0], credit)
    return result


def numpy_process_advantages(step_rewards, step_ends, num_generations, length, *, credit="sum_to_go", **options):
    """Section 4.1.3, and the credits whose returns are normalized in the place of rewards."""
    if credit in ("sum_to_go", "mean_to_go", "step"):
        return numpy_credited_advantages(step_rewards, step_ends, num_generations, length, credit=credit, **options)
    returns = []
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        scores = [score for row in group for score in row if is_score(score)]
        mean = np.mean(scores) if scores else 0.0
        returns += [[numpy_return(row, k, credit, mean) for k in range(len(row))] for row in group]
    # a step without return is credited as the next that has one
    return numpy_credited_advantages(returns, step_ends, num_generations, length, credit="next", **options)


def numpy_return(row, k, credit, mean):
    """What a completion returns from step k on."""
    if not is_score(row[k]):
        return None
    to_go = [score for score in row[k:] if is_score(score)]
    scored = [score for score in row if is_score(score)]
    match credit:
        case "min":
            return min(to_go)
        case "softmin":
            weights = np.exp(-(np.array(scored) - min(scored)) / 0.1)
            weights /= weights.sum()
            return float((weights * scored)[len(scored) - len(to_go) :].sum())
        case "delta":
            if len(to_go) == 1:
                return None
            return sum(first - second for first, second in pairwise(to_go)) + to_go[-1]
        case "clip":
            return sum(min(score - mean, 0.0) for score in to_go)


def numpy_credit(normalized, k, credit):
    """The advantage of step k."""
    to_go = [(j, score) for j, score in enumerate(normalized) if j >= k and score is not None]
    if not to_go:
        return 0.0
    values = [score for _, score in to_go]
    match credit:
        case "sum_to_go":
            return sum(values)
        case "mean_to_go":
            return sum(values) / len(values)
        case "step":
            return normalized[k] or 0.0
        case "next":
            return values[0]


def numpy_kl(logps, ref_logps, estimator):
    d = np.asarray(logps, np.float64) - np.asarray(ref_logps, np.float64)
    return {"k1": d, "k2": d**2 / 2, "k3": np.expm1(-d) + d, "abs": np.abs(d)}[estimator]


def numpy_policy_loss(ratio, advantage, epsilon_low, epsilon_high, delta):
    clipped = min(max(ratio, 1 - epsilon_low), 1 + epsilon_high)
    return -min((ratio if delta is None else min(ratio, delta)) * advantage, clipped * advantage)


def numpy_aggregate(per_token, mask, loss_type, max_completion_length):
    rows = [[value for value, own in zip(*row, strict=True) if own] for row in zip(per_token, mask, strict=True)]
    tokens = sum(map(len, rows))
    total = sum(map(sum, rows))
    match loss_type:
        case "grpo" | "sapo":
            return sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)
        case "dapo" | "cispo" | "vespo" | "bnpo":
            return total / max(tokens, 1)
        case "dr_grpo":
            return total / (len(rows) * max_completion_length)
        case "luspo":
            return total / len(rows)


def is_score(score):
    return score is not None and not math.isnan(score)
