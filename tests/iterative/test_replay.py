import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.iterative.replay import is_held_out, mix_with_replay, preference_pairs

from .helpers import rollout


VERDICTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([0.0, 1.0, None])), min_size=0, max_size=40
)


@given(VERDICTS, st.integers(0, 5))
def test_pairs_are_of_one_question_and_use_an_output_once(verdicts, seed):
    rollouts = [rollout(question, str(i), verdict) for i, (question, verdict) in enumerate(verdicts)]
    pairs = preference_pairs(rollouts, random.Random(seed))
    for right, wrong in pairs:
        assert right.prompt == wrong.prompt
        assert (right.verified, wrong.verified) == (1.0, 0.0)
    used = Counter(output.completion for pair in pairs for output in pair)
    assert set(used.values()) <= {1}
    counts = Counter(verdicts)
    assert len(pairs) == sum(min(counts[question, 1.0], counts[question, 0.0]) for question in "abc")


@given(st.integers(1, 400), st.integers(0, 400), st.floats(0, 0.9), st.integers(0, 5))
def test_the_share_of_replay_is_the_configured_one(num_new, num_history, ratio, seed):
    new = [("new", i) for i in range(num_new)]
    history = [("old", i) for i in range(num_history)]
    mixture = mix_with_replay(new, history, ratio, random.Random(seed))
    assert len(set(mixture)) == len(mixture)  # without replacement
    assert set(new) <= set(mixture)
    replayed = len(mixture) - num_new
    wanted = ratio * (num_new + replayed)  # of the mixture
    assert replayed == num_history or abs(replayed - wanted) <= 1
    assert mixture == mix_with_replay(new, history, ratio, random.Random(seed))


def test_a_tenth_of_the_mixture():
    mixture = mix_with_replay(["new"] * 90, list(range(1000)), 0.1, random.Random(0))
    assert len(mixture) == 100
    assert mixture.count("new") == 90


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_held_out_questions_are_a_fixed_share(share):
    questions = [f"{i} + {j}?" for i in range(100) for j in range(100)]
    held_out = [is_held_out(question, share) for question in questions]
    assert sum(held_out) / len(held_out) == pytest.approx(share, abs=0.02)
    conversation = [{"role": "user", "content": "1 + 1?"}]
    assert is_held_out(conversation, 0.5) == is_held_out([dict(reversed(conversation[0].items()))], 0.5)
