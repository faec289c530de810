import pytest
from datasets import Dataset

from trl_grpo_ext.benchmarks import BENCHMARKS, CHINESE, ENGLISH, Judged, judge, score, summarize


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        ("so it costs 18.", "16 + 2 = 18\n#### 18", Judged(True, "18")),
        (r"\boxed{18.0}", "#### 18", Judged(True, "18")),
        (r"first \boxed{17}, no, \boxed{18}", "#### 18", Judged(True, "18")),
        (r"first \boxed{18}, no, \boxed{17}", "#### 18", Judged(False, "17")),
        (r"\boxed{2} and \boxed{1}", r"either \boxed{1} or \boxed{2}", Judged(True, "1; 2")),
        (r"\boxed{2} and \boxed{2}", r"either \boxed{1} or \boxed{2}", Judged(False, "2; 2")),
        (r"\boxed{2}", r"either \boxed{1} or \boxed{2}", Judged(False, "2")),
        (r"\boxed{5}", r"\boxed{\boxed{5}}", Judged(True, "5")),
        ("no answer", "#### 18", Judged(False, None)),
        ("18", "", Judged(False, "18")),
    ],
)
def test_the_last_answers_are_judged_as_many_as_the_solution_has(text, solution, expected):
    assert judge(text, solution) == expected


def test_scores_by_hand():
    right, wrong, other = Judged(True, "1"), Judged(False, "2"), Judged(False, None)
    metrics = score([right, wrong], [[right, wrong, wrong, right], [other, wrong, wrong, other]])
    values = {name: interval["value"] for name, interval in metrics.items()}
    # Groups of 2 of the first problem tie, each for half a vote; so do all 4
    assert values == {"greedy": 0.5, "maj@1": 0.25, "pass@1": 0.25, "maj@4": 0.25, "pass@4": 0.5}
    assert all(interval["low"] <= interval["value"] <= interval["high"] for interval in metrics.values())


def test_k_goes_up_to_the_number_of_samples():
    right = Judged(True, "1")
    assert list(score([right], [[right] * 6])) == [
        "greedy", "maj@1", "pass@1", "maj@4", "pass@4", "maj@6", "pass@6",
    ]  # fmt: skip
    assert list(score([right], [[]])) == ["greedy"]


def test_a_summary_counts_what_has_no_answer_or_no_end():
    rows = Dataset.from_list(
        [
            {"solution": "#### 1", "greedy": "it is 1", "greedy_is_truncated": False, "samples": ["1", "2"]},
            {"solution": "#### 2", "greedy": "it is", "greedy_is_truncated": True, "samples": ["2", "2"]},
        ]
    )
    summary = summarize(rows)
    assert summary["greedy"]["value"] == 0.5
    assert summary["pass@2"]["value"] == 1.0
    assert (summary["unparsed"], summary["truncated"], summary["num_problems"]) == (0.5, 0.5, 2)


def test_instructions_are_the_papers_in_the_language_of_the_questions():
    assert {name: benchmark.instruction for name, benchmark in BENCHMARKS.items()} == {
        "gsm8k": ENGLISH, "math": ENGLISH, "math500": ENGLISH, "mgsm_zh": CHINESE, "cmath": CHINESE,
    }  # fmt: skip
    assert all(r"\boxed{}" in instruction for instruction in (ENGLISH, CHINESE))
