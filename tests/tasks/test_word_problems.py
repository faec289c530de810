import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_grpo_ext.evaluation import evaluate_policy
from trl_grpo_ext.tasks import EMBEDDED_POLICY, make_dataset, working_reward
from trl_grpo_ext.tasks.word_problems import (
    LARGEST_TOTAL,
    Problem,
    imperfect_solution,
    reference_solution,
    sample_problems,
    word_problem,
)


PROBLEM = Problem(12, (("+", 7), ("-", 5), ("*", 2)))


def score(text, problem=PROBLEM):
    return working_reward([text.splitlines(keepends=True)], [problem.equations], [str(problem.totals[-1])])[0]


def test_reference_solution():
    assert reference_solution(PROBLEM) == "12 + 7 = 19\n19 - 5 = 14\n14 * 2 = 28\nThe answer is \\boxed{28}."


def test_reference_equations_are_true_and_stay_in_range():
    for problem in sample_problems(300, held_out=False, seed=3):
        assert 3 <= len(problem.equations) <= 4
        for equation in problem.equations:
            left, right = equation.split(" = ")
            assert eval(left) == int(right)
        assert all(1 <= total <= LARGEST_TOTAL for total in problem.totals)


def test_word_problems_tell_all_numbers_in_order():
    text = word_problem(PROBLEM, random.Random(0))
    assert [int(word.strip(".")) for word in text.split() if word.strip(".").isdigit()] == [12, 7, 5]
    assert "double" in text


def test_splits_share_no_problem():
    training = set(sample_problems(3000, held_out=False, seed=0))
    held_out = set(sample_problems(500, held_out=True, seed=1))
    assert len(training) == 3000
    assert len(held_out) == 500
    assert not training & held_out
    told = {prompt[0]["content"] for prompt in make_dataset(3000)["prompt"]}
    assert not told & {prompt[0]["content"] for prompt in make_dataset(500, held_out=True, seed=1)["prompt"]}


def test_data_set_is_repeatable():
    assert make_dataset(20, seed=4).to_list() == make_dataset(20, seed=4).to_list()
    assert make_dataset(20, seed=4).to_list() != make_dataset(20, seed=5).to_list()


def test_tutor_slips_at_his_rate_and_goes_on_from_his_number():
    rng = random.Random(0)
    assert imperfect_solution(PROBLEM, rng, 0.0) == reference_solution(PROBLEM)
    first_lines = [imperfect_solution(PROBLEM, rng, 0.2).split("\n")[0] for _ in range(2000)]
    assert 0.17 < sum(line != "12 + 7 = 19" for line in first_lines) / 2000 < 0.23
    lines = imperfect_solution(PROBLEM, rng, 1.0).split("\n")
    assert lines[1].split()[0] == lines[0].split()[-1]
    assert lines[3] == rf"The answer is \boxed{{{lines[2].split()[-1]}}}."


class TestWorkingReward:
    def test_a_right_solution(self):
        assert score(reference_solution(PROBLEM)) == [1, 1, 1, 1]

    def test_all_lines_after_a_slip_are_wrong(self):
        text = "12 + 7 = 19\n19 - 5 = 13\n13 * 2 = 26\nThe answer is \\boxed{26}."
        assert score(text) == [1, 0, 0, 0]

    def test_stopping_early_is_wrong(self):
        assert score("12 + 7 = 19\n19 - 5 = 14\n") == [1, 0]

    @pytest.mark.parametrize(
        "filler", ["12 + 7 = 19\n", "1 + 1 = 2\n", "So:\n", "The answer is \\boxed{28}.\n", "12 + 0 = 12\n"]
    )
    def test_filler_earns_nothing_wherever_it_stands(self, filler):
        right = reference_solution(PROBLEM).splitlines(keepends=True)
        for position in range(1, len(right)):
            padded = "".join([*right[:position], filler * 3, *right[position:]])
            assert sum(score(padded)) <= len(right)
        assert sum(score(filler * 10)) <= 1

    def test_two_equations_in_a_line_are_wrong(self):
        assert score("12 + 7 = 19 19 - 5 = 14\nThe answer is \\boxed{28}.") == [0, 1]


class TestEmbeddedPolicy:
    def test_is_small_and_starts_where_training_has_room(self):
        assert (EMBEDDED_POLICY / "model.safetensors").stat().st_size < 3_000_000
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED_POLICY)
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)
        held_out = make_dataset(64, held_out=True, seed=1)
        accuracy = evaluate_policy(model, tokenizer, held_out, max_new_tokens=64, batch_size=128)
        assert 0.3 < accuracy["pass@1"] < 0.6
        assert accuracy["pass@8"] > 0.9

    def test_writes_any_text_back(self):
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)
        for text in ("Mia has 12 apples.", "12 + 7 = 19\n", "naïve 日本語 🙂\n\n", r"\boxed{28}"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
