import json
import os
from pathlib import Path

import pytest

from trl_grpo_ext.rewards import answer_reward
from trl_grpo_ext.rewards.extraction import final_answer
from trl_grpo_ext.rewards.notation import as_number


DATA = Path(os.environ.get("TRL_GRPO_EXT_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"\boxed{28}", "28", 1.0),
        (r"\boxed{28.0}", "28", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{3/4}", "0.75", 1.0),
        (r"\boxed{$28$}", "28", 1.0),
        (r"\boxed{29}", "28", 0.0),
        (r"\boxed{28}", 28, 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{12,34}", "1234", 0.0),
        (r"\boxed{28}", None, None),
        (r"\boxed{" + "x" * 300 + "}", "x" * 300, 1.0),
        (r"\boxed{2", "2", 0.0),
        ("#### 72", "Natalia sold 72.\n#### 72", 1.0),
        (r"\boxed{\frac{3}{4}}", r"so we get \boxed{\dfrac{3}{4}}", 1.0),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{5}", 0.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        (r"\boxed{1/0}", "5", 0.0),
        (r"\boxed{28}", "", None),
        ("9" * 300, "9", 0.0),
        (r"\boxed{9}", "9" * 300, None),
    ],
)
def test_answer_reward(completion, gold, expected):
    assert answer_reward([completion], [gold]) == [expected]
    assert answer_reward([[{"role": "assistant", "content": completion}]], [gold]) == [expected]


@pytest.mark.parametrize(
    "completion", [[{"role": "assistant", "content": None}], [{"role": "assistant"}], [], None, ""]
)
def test_an_empty_completion_is_wrong(completion):
    assert answer_reward([completion], ["1"]) == [0.0]


def test_content_may_be_parts():
    parts = [{"type": "text", "text": r"\boxed"}, {"type": "text", "text": "{1}"}]
    assert answer_reward([[{"role": "assistant", "content": parts}]], ["1"]) == [1.0]
    assert answer_reward([[{"content": [{"type": "image"}, {"text": None}, r"\boxed{1}"]}]], ["1"]) == [1.0]


def test_without_math_verify_what_is_no_number_is_compared_as_text(monkeypatch):
    monkeypatch.setattr("trl_grpo_ext.rewards.answer.find_spec", lambda name: None)
    assert answer_reward([r"\boxed{x + 1}", r"\boxed{1 + x}", r"\boxed{2 8}"], ["x+1", "x+1", "28"]) == [1.0, 0.0, 0.0]


def test_large_numbers_are_compared_exactly():
    assert as_number("10000000000000001") != as_number("10000000000000000")


def test_agrees_with_the_labels_of_real_solutions():
    path = DATA / "gsm8k" / "example_model_solutions.jsonl"
    if not path.exists():
        pytest.skip(f"no GSM8K data at {path}; set TRL_GRPO_EXT_DATA to the folder that holds gsm8k/")
    checked = agreed = 0
    for line in path.open():
        row = json.loads(line)
        gold = final_answer(row["ground_truth"])
        for solution in row.values():
            if isinstance(solution, dict):
                checked += 1
                agreed += (answer_reward([solution["solution"]], [gold]) == [1.0]) == solution["is_correct"]
    assert checked > 1000
    assert agreed / checked > 0.97
