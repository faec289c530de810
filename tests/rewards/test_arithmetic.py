import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.rewards import arithmetic_reward
from trl_grpo_ext.rewards.arithmetic import check_equations

from .test_answer import DATA


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.", [True]),
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.", [True]),
        ("She makes 9 * 2 = $<<9*2=17>>17 every day.", [False]),
        ("So $5 x 3 = $15.", [True]),
        ("3 apples + 4 apples = 8 apples", [False]),
        ("That is 20% of 50 = 10, or 1/2 of 20 = 10.", [True, True]),
        ("18/3 = 6 packages of 3", [True]),
        ("(3 + 4) * 2 = 14", [True]),
        ("10 / 3 = 3.33", [True]),
        ("10 / 3 = 3.34", [False]),
        ("10 / 3 = 3", [False]),
        ("1,200 + 300 = 1,500 dollars", [True]),
        ("$350 000 x 5/100 = $17 500", [True]),
        ("50/100 = 50%", [True]),
        ("12 \u00d7 3 = 36 and 36 \u00f7 6 = 6", [True, True]),
        ("2 * 3 = 6, then 6 - 1 = 4", [True, False]),
        ("2 * 3 = 6 - 1 = 5", [False, True]),
        ("-3 + 5 = 2", [True]),
        ("the total of these 3 countries is -48+21+-3 = -30", [True]),
        ("4.20 + 9.45 + 1.35 = <<4.20+9.45+1.35=14.999999999999998>>15", [True, True]),
        ("- 3 + 4 = 7\n* 3 * 4 = 12", [True, True]),
        ("\u22123 + 5 = 2", [True]),
        ("1/3 = 33%", [True]),
        ("50% + 20% = 80%", [False]),
        ("<<" + "1" * 500 + "/3=1>>", []),
        *((text, []) for text in (
            "5(2 + 3) = 25", "(3)(4) + 1 = 13", "2^2 + 3 = 7", "5^2 - 4 = 21", "\u221a16 + 2 = 6", "sqrt(9) * 2 = 6",
            "log(10) * 3 = 3", "x + 2 - 3 = 7", "x - 4 + 2 = 9", "total - 5 + 3 = 8", "a1 + 2 = 5", "x_1 + 2 = 5",
            "x/2 + 3 = 7", "3x + 2 + 4 = 3x + 6", "7 / 2 = 3 remainder 1", "10/3 = 3 1/3",
            "100 + 10% = 110", "30 minutes * 4 = 2 hours", "50 cents * 4 = $2", "2 thousand * 3 = 6000",
            "1e3 + 1 = 1001", "version 1.2.3 - 4 = 5", "sin(0) + 1 = 1", "2 + 3 = 5x", "7 - 3 = 4y + 2",
            r"3 \times 4 = 12", r"\frac{1}{2} + 1 = 2",
        )),
        ("x = 5", []),
        ("2s + 30 = 110", []),
        ("the discount is x - 25% = 19.50", []),
        ("1 / 0 = 3", []),
        ("no sums here", []),
        ("", []),
    ],
)  # fmt: skip
def test_equations(text, verdicts):
    assert [verdict for _, verdict in check_equations(text)] == verdicts


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 500), st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 500)), min_size=1, max_size=4),
    st.integers(-3, 3), st.sampled_from(["", " ", " apples "]),
)  # fmt: skip
def test_agrees_with_python(first, operations, slip, gap):
    expression = "".join([str(first), *(f"{gap or ''}{op} {n}" for op, n in operations)])
    value = eval("".join([str(first), *(f"{op}{n}" for op, n in operations)]))
    [(_, verdict)] = check_equations(f"We have {expression} = {value + slip}{gap or ' now'}")
    assert verdict == (slip == 0)


def test_score_of_a_step():
    steps = [["We add.", "3 + 4 = 7 and 7 + 1 = 8", "3 + 4 = 7", "8 + 1 = 10, as 3 + 4 = 7", "The answer is 10."]]
    assert arithmetic_reward(steps) == [[None, 1.0, None, 0.0, None]]
    assert arithmetic_reward([[""], []]) == [[None], []]


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000 + " + 1 = 2",
        "(" * 5000 + "1 + 1 = 2",
        "1 + " * 3000 + "1 = 2",
        "1 - " * 50000,
        "1 = " * 50000,
        "1 + 1 = 2 " * 9999,
    ],
)
def test_pathological_texts_end_soon(text):
    check_equations(text)


def test_verdicts_on_real_solutions(capsys):
    path = DATA / "gsm8k" / "example_model_solutions.jsonl"
    if not path.exists():
        pytest.skip(f"no GSM8K data at {path}; set TRL_GRPO_EXT_DATA to the folder that holds gsm8k/")
    counts = Counter()
    for line in path.open():
        for solution in json.loads(line).values():
            if isinstance(solution, dict):
                scores = arithmetic_reward([solution["solution"].split("\n")])[0]
                counts[solution["is_correct"], 0.0 in scores, any(score is not None for score in scores)] += 1
    wrong = {flagged: sum(counts[False, flagged, checked] for checked in (True, False)) for flagged in (True, False)}
    right = {flagged: sum(counts[True, flagged, checked] for checked in (True, False)) for flagged in (True, False)}
    with capsys.disabled():
        print(
            f"\nof {sum(wrong.values())} wrong solutions {wrong[True]} have a false equation, "
            f"of {sum(right.values())} right ones {right[True]}"
        )
    # a wrong solution mostly goes wrong in what it computes, not in how; false lines in right ones are real slips
    assert wrong[True] / sum(wrong.values()) > 5 * right[True] / sum(right.values())
    assert right[True] / sum(right.values()) < 0.03
