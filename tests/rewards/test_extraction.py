import time

import pytest

from trl_grpo_ext.rewards.extraction import (
    ExtractedAnswer,
    boxed_answers,
    deepseekmath_answers,
    extract_answer,
    final_answer,
    gold_answer,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"first \boxed{3}, then \boxed{4", "3"),
        (r"cut off: \boxed{4", None),
        (r"\boxed{}", None),
        (r"\boxed{a + \boxed{b}}", "b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("2 + 2 = 4\n#### 1,234", "1,234"),
        ("#### 5 apples\nand 6 pears", "5 apples"),
        ("The answer is 12.5 apples, not 13.", "12.5"),
        ("The answer is 1/2.", "1/2"),
        (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"The answer is \frac{1}{2}, or so.", r"\frac{1}{2}"),
        ("The answer is .5", ".5"),
        ("so 10-5", "5"),
        ("so it is -5", "-5"),
        ("1,2", "2"),
        ("12,345 and 1,234,567", "1,234,567"),
        ("They have 3 left and then 40.", "40"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


def test_a_text_full_of_open_boxes_takes_no_time():
    started = time.perf_counter()
    assert final_answer(r"\boxed{" * 20_000) is None
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"#### 3, so \boxed{4}", ExtractedAnswer("4", "boxed")),
        ("The answer is 3.\n#### 4", ExtractedAnswer("4", "hashes")),
        ("5 of them. The answer is **3**, not 4.", ExtractedAnswer("3", "phrase")),
        ("Final answer: 3. Check: 2 + 1", ExtractedAnswer("3", "phrase")),
        ("所以答案是12个。", ExtractedAnswer("12", "phrase")),
        ("答案\uff1a十二", ExtractedAnswer("十二", "phrase")),
        ("3 and 4", ExtractedAnswer("4", "last_number")),
        ("3 \u2212 4 = \u22121", ExtractedAnswer("\u22121", "last_number")),
        ("none", None),
        ("####", None),
    ],
)
def test_says_where_an_answer_was_found(text, expected):
    assert extract_answer(text) == expected


def test_boxes_come_in_the_order_in_which_they_open():
    assert boxed_answers(r"\boxed{1 \boxed{2}} and \boxed{\frac{3}{4}} and \boxed{5") == [
        r"1 \boxed{2}", "2", r"\frac{3}{4}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The final answer is $3$. I hope it is correct. \boxed{4}", ["3"]),
        (r"\boxed{1}, \boxed{2}; the answer is 3", ["1", "2"]),
        ("The answer is: 3.\nThe answer is 4.\nDone with 5", ["4"]),
        ("it costs 1,234 and then 1,235", ["1,235"]),
        ("no number", []),
    ],
)
def test_deepseekmath_looks_in_its_own_order(text, expected):
    assert deepseekmath_answers(text) == expected


@pytest.mark.parametrize(
    ("gold", "expected"),
    [("7 + 5 = 12\n#### 12", "12"), (r"so \boxed{\frac12}.", r"\frac12"), (" 12 ", "12"), (12, "12"), (None, None)],
)
def test_a_gold_answer_may_end_a_solution_or_stand_alone(gold, expected):
    assert gold_answer(gold) == expected
