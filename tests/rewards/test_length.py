import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import get_soft_overlong_punishment

from trl_grpo_ext.rewards.length import get_step_overlong_punishment


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 120), st.data())
def test_the_steps_punishments_add_up_to_that_of_the_completion(step_lengths, longest, data):
    cache = data.draw(st.integers(0, longest))
    ends = [sum(step_lengths[: step + 1]) - 1 for step in range(len(step_lengths))]
    (scores,) = get_step_overlong_punishment(longest, cache)([ends])
    (whole,) = get_soft_overlong_punishment(longest, cache)([[0] * sum(step_lengths)])
    assert sum(scores) == pytest.approx(whole)
    assert all(score <= 0 for score in scores)


def test_only_the_steps_that_are_too_long_are_punished():
    # 100 tokens at most, of which the last 20 cost 1/20 each
    assert get_step_overlong_punishment(100, 20)([[79, 89, 99, 109]], steps=["a", "b", "c", "d"]) == [
        [0.0, -0.5, -0.5, 0.0]
    ]
