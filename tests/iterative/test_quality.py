import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.iterative.quality import pair_metrics, unexplained_reward


OUTPUTS = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0, None]), st.sampled_from([0.0, 1.0, None]), st.sampled_from("ab")),
    max_size=20,
)


@given(OUTPUTS)
def test_pair_metrics_equal_counting_all_pairs(outputs):
    metrics = pair_metrics([o[0] for o in outputs], [o[1] for o in outputs], [o[2] for o in outputs])
    known = [o for o in outputs if o[0] is not None and o[1] is not None]
    wins, pair_wins = [], []
    for score, verdict, question in known:
        for other_score, other_verdict, other_question in known:
            if verdict == 1 and other_verdict == 0:
                win = 1.0 if score > other_score else 0.5 if score == other_score else 0.0
                wins.append(win)
                if question == other_question:
                    pair_wins.append(win)
    for name, values in (("agreement", wins), ("pair_accuracy", pair_wins)):
        expected = sum(values) / len(values) if values else math.nan
        assert metrics[name] == pytest.approx(expected, nan_ok=True)
    assert metrics["num_pairs"] == len(pair_wins)


def test_calibrated_margins_have_a_small_error():
    rng = np.random.default_rng(0)
    margins = rng.normal(0, 1.5, 4000)
    is_first_right = rng.random(4000) < 1 / (1 + np.exp(-margins))
    scores, verified, questions = [], [], []
    for index, (margin, first) in enumerate(zip(margins, is_first_right, strict=True)):
        scores += [margin, 0.0]
        verified += [float(first), float(not first)]
        questions += [str(index)] * 2
    assert pair_metrics(scores[:1000], verified[:1000], questions[:1000])["calibration_error"] < 0.06
    overconfident = [10 * score for score in scores[:1000]]
    assert pair_metrics(overconfident, verified[:1000], questions[:1000])["calibration_error"] > 0.15


def test_reward_that_accuracy_does_not_explain():
    # right outputs were worth 2 and wrong ones -2: at an accuracy of 3/4 a mean of 1 is explained
    assert unexplained_reward([2, 2, 2, -2], [1, 1, 1, 0], 2, -2) == 0
    # rewards of 2 for outputs that are all wrong are one whole distance too high
    assert unexplained_reward([2, 2], [0, 0], 2, -2) == 1
