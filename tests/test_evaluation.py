from itertools import combinations

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.evaluation import (
    bootstrap_interval,
    confidence_interval,
    evaluate_policy,
    maj_at_k,
    pass_at_k,
    vote,
)
from trl_grpo_ext.rewards.extraction import final_answer


@given(
    st.lists(st.booleans(), min_size=1, max_size=8).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(1, len(row)))
    )
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    row, k = case
    subsets = list(combinations(row, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(torch.tensor([row]), k).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 3, 1.0),
        (["8", "7", "8"], [False, True, False], 3, 0.0),
        (["8", "7"], [False, True], 2, 0.5),  # a tie
        ([None, None, "7"], [False, False, True], 3, 1.0),  # no answer, no vote
        ([None, None], [False, False], 2, 0.0),
        (["7", "8", "8"], [True, False, False], 1, 1.0),  # only the first votes
    ],
)
def test_maj_at_k(answers, correct, k, expected):
    assert maj_at_k([answers], torch.tensor([correct]), k).tolist() == [expected]


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match=f"`k` is {k}, but must be between 1 and the number of samples a problem, 3"):
        pass_at_k(torch.zeros(1, 3, dtype=torch.bool), k)
    with pytest.raises(ValueError, match=f"`k` is {k}"):
        maj_at_k([["1", "2", "3"]], torch.zeros(1, 3, dtype=torch.bool), k)


@pytest.mark.parametrize(("right", "total"), [(0, 10), (7, 10), (250, 256), (256, 256)])
def test_confidence_interval_holds_the_accuracies_within_two_standard_errors(right, total):
    accuracy = right / total
    for bound in confidence_interval(accuracy, total):
        # At a bound other than 0 and 1 the observed accuracy is just 1.96 standard errors away.
        standard_error = (bound * (1 - bound) / total) ** 0.5 if 0 < bound < 1 else 0
        assert abs(accuracy - bound) == pytest.approx(1.96 * standard_error, abs=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_bootstrap_interval_of_many_problems_is_that_of_the_normal_distribution(share):
    values = (torch.arange(1000) < 1000 * share).float()
    half_width = 1.96 * (share * (1 - share) / 1000) ** 0.5
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(share - half_width, abs=2e-3)
    assert high == pytest.approx(share + half_width, abs=2e-3)
    assert bootstrap_interval(values) == (low, high)


def test_bootstrap_interval_of_equal_values_has_no_width():
    assert bootstrap_interval(torch.ones(5)) == (1.0, 1.0)


def test_numbers_vote_by_their_value():
    assert vote("28.0") == vote("28") == "28"
    assert vote("1,000") == vote("1000")
    assert vote("x + 1") == "x + 1"
    assert vote(None) is None


class TestEvaluatePolicy:
    @pytest.fixture
    def dataset(self, model, tokenizer):
        """Problems whose gold answers are what the policy says greedily, all but one."""
        prompts = [f"Count {index}:" for index in range(5)]
        texts = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            output = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=tokenizer.pad_token_id)
            texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        golds = [final_answer(text) or "no answer" for text in texts]
        return Dataset.from_dict({"prompt": prompts, "solution": golds})

    def test_greedy_accuracy_is_that_of_greedy_decoding(self, model, tokenizer, dataset):
        expected = sum(gold != "no answer" for gold in dataset["solution"]) / 5
        results = evaluate_policy(model, tokenizer, dataset, num_samples=4, max_new_tokens=8, batch_size=3)
        assert results["greedy"] == pytest.approx(expected)
        assert results["num_problems"] == 5
        assert list(results) == ["greedy", "pass@1", "maj@4", "pass@4", "num_problems"]
        assert results["pass@1"] <= results["pass@4"]

    def test_is_repeatable_and_leaves_state_alone(self, model, tokenizer, dataset):
        model.train()
        torch.manual_seed(5)
        first = evaluate_policy(model, tokenizer, dataset, num_samples=4, max_new_tokens=8)
        drawn = torch.rand(1)
        second = evaluate_policy(model, tokenizer, dataset, num_samples=4, max_new_tokens=8)
        assert first == second
        assert model.training
        torch.manual_seed(5)
        assert torch.equal(torch.rand(1), drawn)
