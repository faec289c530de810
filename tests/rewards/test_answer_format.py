import pytest

from trl_grpo_ext.rewards import format_reward


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"so \boxed{3}.", 1.0),
        (r"\boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{3} or \boxed{4}", 0.0),
        (r"\boxed{3} or \boxed{4", 0.0),
        (r"\boxed{3", 0.0),
        (r"\boxed{ }", 0.0),
        ("3", 0.0),
        (None, 0.0),
    ],
)
def test_one_closed_box_is_the_form(completion, expected):
    assert format_reward([completion]) == [expected]
    assert format_reward([[{"role": "assistant", "content": completion}]], solution=["3"]) == [expected]
