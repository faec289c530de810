import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.objective import consistent_completions, outcome_advantages, process_advantages
from trl_grpo_ext.objective.advantages import BASELINES, SCALES
from trl_grpo_ext.objective.step_credit import CREDITS, step_returns

from .reference import is_score, numpy_outcome_advantages, numpy_process_advantages


# Multiples of 1/64 are exact in float32, so that both sides agree on which scores are equal.
SCORES = st.one_of(st.none(), st.just(float("nan")), st.integers(-128, 128).map(lambda n: n / 64))


@st.composite
def groups_of_steps(draw, scores=SCORES):
    num_generations = draw(st.sampled_from([2, 3, 4, 8, 64]))
    num_prompts = draw(st.integers(1, 3 if num_generations < 64 else 1))
    length = draw(st.integers(1, 12))
    rows = num_generations * num_prompts
    step_ends = [
        sorted(draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=min(length, 4)))) for _ in range(rows)
    ]
    step_rewards = [draw(st.lists(scores, min_size=len(ends), max_size=len(ends))) for ends in step_ends]
    return step_rewards, step_ends, num_generations, length


class TestPublishedExamples:
    def test_outcome_rewards_of_three_right_and_five_wrong_completions(self):
        rewards = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
        # mean 3/8, population variance 3/8 * 5/8
        std = (3 / 8 * 5 / 8) ** 0.5
        expected = [(1 - 3 / 8) / std] * 3 + [(0 - 3 / 8) / std] * 5
        advantages = outcome_advantages(rewards, 8, std_correction=0, eps=0)
        assert advantages.tolist() == pytest.approx(expected)
        assert [round(value, 2) for value in advantages.tolist()] == [1.29] * 3 + [-0.77] * 5

    def test_normalized_step_rewards_are_summed_to_go(self):
        # Rewards with mean 0 of the group and no scaling are their own normalized rewards.
        advantages = process_advantages(
            [[0.5, -1.0, 0.8], [-0.3]], [[0, 1, 2], [0]], num_generations=2, length=3, scale="none"
        )
        assert advantages[0].tolist() == pytest.approx([0.3, -0.2, 0.8], abs=1e-6)

    @pytest.mark.parametrize(
        ("std_correction", "expected"),
        [
            (0, [(-0.534522, -1.603567), (0.534522, 0.801784, 1.069045)]),
            (1, [(-0.478091, -1.434274), (0.478091, 0.717137, 0.956183)]),
        ],
    )
    def test_step_rewards_of_a_group_of_two(self, std_correction, expected):
        advantages = process_advantages(
            [[1, 0], [0.5, 0.5, 1]], [[0, 1], [0, 1, 2]], 2, 3, std_correction=std_correction, eps=0
        )
        assert advantages[0, :2].tolist() == pytest.approx(expected[0], abs=1e-6)
        assert advantages[0, 2] == 0
        assert advantages[1].tolist() == pytest.approx(expected[1], abs=1e-6)


class TestProcessAdvantages:
    @pytest.mark.parametrize("credit", CREDITS)
    @pytest.mark.parametrize("baseline", BASELINES)
    @settings(max_examples=40, deadline=None)
    @given(
        groups_of_steps(),
        st.sampled_from(SCALES),
        st.sampled_from([0, 1]),
        st.sampled_from([1e-4, 1.0]),
    )
    def test_equals_the_formula_by_loops(self, credit, baseline, case, scale, std_correction, eps):
        step_rewards, step_ends, num_generations, length = case
        options = {
            "credit": credit,
            "baseline": baseline,
            "scale": scale,
            "std_correction": std_correction,
            "eps": eps,
        }
        ours = process_advantages(step_rewards, step_ends, num_generations, length, **options)
        theirs = numpy_process_advantages(step_rewards, step_ends, num_generations, length, **options)
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-4, atol=2e-4)

    @settings(max_examples=50, deadline=None)
    @given(groups_of_steps())
    def test_does_not_depend_on_what_else_is_in_the_batch(self, case):
        step_rewards, step_ends, num_generations, length = case
        together = process_advantages(step_rewards, step_ends, num_generations, length)
        apart = [
            process_advantages(
                step_rewards[start : start + num_generations],
                step_ends[start : start + num_generations],
                num_generations,
                length,
            )
            for start in range(0, len(step_rewards), num_generations)
        ]
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)

    @settings(max_examples=50, deadline=None)
    @given(groups_of_steps(), st.integers(1, 5))
    def test_does_not_depend_on_padding(self, case, padding):
        step_rewards, step_ends, num_generations, length = case
        short = process_advantages(step_rewards, step_ends, num_generations, length)
        long = process_advantages(step_rewards, step_ends, num_generations, length + padding)
        assert torch.equal(long[:, :length], short)
        assert not long[:, length:].any()

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(SCORES, min_size=6, max_size=6),
        st.sampled_from(SCALES),
        st.sampled_from(BASELINES),
        st.sampled_from(["sum_to_go", "mean_to_go", "step", "min", "softmin"]),
    )
    def test_with_one_step_it_is_outcome_supervision(self, rewards, scale, baseline, credit):
        options = {"scale": scale, "baseline": baseline}
        process = process_advantages([[reward] for reward in rewards], [[3]] * 6, 3, 4, credit=credit, **options)
        outcome = outcome_advantages(
            torch.tensor([float("nan") if reward is None else reward for reward in rewards]), 3, **options
        )
        assert torch.equal(process, outcome[:, None].expand(-1, 4))

    def test_only_the_plain_sum_pays_for_steps_that_are_as_good_as_the_others(self):
        # The same mean reward in two and in six steps, against a completion below it
        rewards = [[0.8] * 2, [0.8] * 6, [0.2] * 2]
        ends = [list(range(len(row))) for row in rewards]
        first_token = {
            credit: process_advantages(rewards, ends, 3, 6, credit=credit)[:, 0].tolist() for credit in CREDITS
        }
        assert first_token["sum_to_go"][1] == pytest.approx(3 * first_token["sum_to_go"][0])
        for credit in ("mean_to_go", "step", "min", "delta", "clip"):
            assert first_token[credit][1] == pytest.approx(first_token[credit][0], rel=1e-5)
        # a soft minimum over more equal steps is the same up to how it weighs them
        assert first_token["softmin"][1] == pytest.approx(first_token["softmin"][0], rel=1e-5)

    @pytest.mark.parametrize("credit", ["sum_to_go", "step", "min", "softmin", "delta", "clip"])
    def test_advantages_of_steps_are_centered(self, credit):
        rewards = torch.rand(64, 5, generator=torch.Generator().manual_seed(0)).tolist()
        advantages = process_advantages(rewards, [[0, 1, 2, 3, 4]] * 64, 64, 5, credit=credit)
        if credit == "sum_to_go":  # a step's advantage is a sum; what is centered is the normalized rewards
            advantages = advantages - advantages.roll(-1, dims=1).where(torch.arange(5) < 4, 0)
        assert abs(advantages.mean().item()) < 1e-5

    def test_softmin_returns_about_the_smallest_reward(self):
        # PURE: the return from the start is about the worst step's reward, whatever the number of steps
        rewards = torch.tensor([[0.9, 0.1, 0.8], [0.5, torch.nan, torch.nan]])
        returns = step_returns(rewards, rewards, "softmin")
        assert returns[0, 0].item() == pytest.approx(0.1, abs=2e-3)
        assert returns[1, 0].item() == pytest.approx(0.5)

    def test_an_unknown_credit_is_refused(self):
        with pytest.raises(ValueError, match="`credit` is 'max', but must be one of 'sum_to_go', 'mean_to_go'"):
            process_advantages([[1.0], [0.0]], [[0], [0]], 2, 1, credit="max")

    def test_a_group_without_steps_has_advantage_zero(self):
        assert not process_advantages([[], []], [[], []], 2, 3).any()

    @pytest.mark.parametrize("ends", [[2, 0], [1, 1], [0, 3], [-1, 2]])
    def test_ends_that_are_no_ascending_positions_are_refused(self, ends):
        with pytest.raises(ValueError, match="but must ascend from 0 to less than `length`, 3"):
            process_advantages([[1.0, 0.0], [0.0, 1.0]], [ends, [0, 1]], 2, 3)

    def test_rewards_and_ends_of_other_number_are_refused(self):
        with pytest.raises(ValueError, match=r"`step_rewards` has 1 entries for completion 1, but `step_ends` has 2"):
            process_advantages([[1.0], [1.0]], [[0], [0, 1]], 2, 2)


class TestOutcomeAdvantages:
    @pytest.mark.parametrize("baseline", BASELINES)
    @pytest.mark.parametrize("scale", SCALES)
    @settings(max_examples=50, deadline=None)
    @given(
        st.sampled_from([2, 3, 8, 64]).flatmap(
            lambda g: st.tuples(st.just(g), st.lists(SCORES, min_size=2 * g, max_size=2 * g))
        )
    )
    def test_equals_the_formula_by_loops(self, baseline, scale, case):
        num_generations, rewards = case
        ours = outcome_advantages(
            torch.tensor([float("nan") if reward is None else reward for reward in rewards]),
            num_generations,
            baseline=baseline,
            scale=scale,
        )
        theirs = numpy_outcome_advantages(rewards, num_generations, baseline=baseline, scale=scale)
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-4, atol=2e-4)

    def test_leave_one_out_is_the_mean_baseline_up_to_a_factor(self):
        # r_i - mean(others) = G / (G - 1) * (r_i - mean(all)), as noted for Dr. GRPO
        rewards = torch.rand(12)
        mean = outcome_advantages(rewards, 4, scale="none")
        others = outcome_advantages(rewards, 4, baseline="leave_one_out", scale="none")
        torch.testing.assert_close(others, mean * 4 / 3)

    def test_without_baseline_and_scale_the_reward_is_the_advantage(self):
        rewards = torch.tensor([1.0, 1.0, 0.0, float("nan")])
        advantages = outcome_advantages(rewards, 2, baseline="none", scale="none")
        assert advantages.tolist() == [1, 1, 0, 0]

    def test_a_batch_baseline_trains_groups_that_are_all_the_same(self):
        rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
        assert not outcome_advantages(rewards, 2).any()
        for scale in SCALES:  # and is never divided by the standard deviation of equal rewards
            advantages = outcome_advantages(rewards, 2, baseline="batch", scale=scale)
            assert advantages.sign().tolist() == [1, 1, -1, -1]
            assert advantages.abs().max() <= 1

    def test_an_unknown_baseline_is_refused(self):
        with pytest.raises(ValueError, match="`baseline` is 'median', but must be one of 'mean', 'leave_one_out'"):
            outcome_advantages(torch.rand(4), 2, baseline="median")

    @pytest.mark.parametrize("num_generations", [2, 8, 64])
    def test_equal_rewards_give_exactly_zero(self, num_generations):
        # The float32 standard deviation of 64 times 0.7 is 6e-8: with eps 0 its advantages would be about 1.
        rewards = torch.full((num_generations,), 0.7)
        assert not outcome_advantages(rewards, num_generations, eps=0).any()

    def test_rewards_that_differ_by_more_than_the_tolerance_count(self):
        rewards = torch.tensor([0.7, 0.7 + 1e-3])
        assert outcome_advantages(rewards, 2).all()
        assert not outcome_advantages(rewards, 2, tolerance=1e-2).any()

    def test_a_single_scored_member_has_advantage_zero(self):
        rewards = torch.tensor([1.0, float("nan"), float("nan"), 1.0, 0.0, float("nan")])
        advantages = outcome_advantages(rewards, 3)
        assert advantages[:3].tolist() == [0, 0, 0]
        assert advantages[3] > 0 > advantages[4]
        assert advantages[5] == 0

    def test_equals_trl_formula(self):
        rewards = torch.rand(4, 8)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(outcome_advantages(rewards.flatten(), 8), expected.flatten())

    def test_half_precision_is_computed_in_float32(self):
        rewards = torch.tensor([1000.0, 1002.0, 1004.0, 1006.0], dtype=torch.bfloat16)
        torch.testing.assert_close(outcome_advantages(rewards, 4), outcome_advantages(rewards.float(), 4))

    def test_an_empty_batch_is_refused(self):
        with pytest.raises(ValueError, match="must divide the number of completions, 0"):
            outcome_advantages(torch.tensor([]), 2)

    def test_a_batch_that_is_no_multiple_of_the_group_is_refused(self):
        with pytest.raises(ValueError, match=r"`num_generations` is 3, but must divide the number of completions, 4"):
            outcome_advantages(torch.rand(4), 3)

    def test_an_unknown_scale_is_refused(self):
        with pytest.raises(ValueError, match=r"`scale` is 'median', but must be one of 'group', 'batch', 'none'"):
            outcome_advantages(torch.rand(4), 2, scale="median")


class TestConsistentCompletions:
    def test_keeps_right_ones_of_high_and_wrong_ones_of_low_process_score_in_balance(self):
        rewards = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])
        process = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.7, 0.6, 0.1, 0.3])
        kept = consistent_completions(rewards, process, 8, keep=0.5)
        assert kept.nonzero().flatten().tolist() == [0, 2, 6, 7]

    def test_a_side_that_is_short_is_made_up_for_by_the_other(self):
        rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
        process = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6])
        kept = consistent_completions(rewards, process, 8, keep=0.5)
        assert kept.nonzero().flatten().tolist() == [0, 2, 4, 6]

    def test_an_all_same_group_has_no_right_ones(self):
        rewards = torch.full((8,), 0.7)  # whose float32 mean is below 0.7
        process = torch.arange(8.0)
        assert consistent_completions(rewards, process, 8, 0.5).nonzero().flatten().tolist() == [0, 1, 2, 3]

    def test_a_completion_without_process_score_is_kept_last(self):
        nan = float("nan")
        kept = consistent_completions(torch.tensor([1.0, 1, 0, 0]), torch.tensor([nan, 0.1, nan, 0.9]), 4, keep=0.5)
        assert kept.tolist() == [False, True, False, True]

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=12, max_size=12),
        st.lists(SCORES, min_size=12, max_size=12),
        st.sampled_from([0.25, 0.5, 0.8, 1.0]),
    )
    def test_equals_the_most_balanced_choice_by_loops(self, rewards, scores, keep):
        process = [float("nan") if score is None else score for score in scores]
        ours = consistent_completions(torch.tensor(rewards), torch.tensor(process), 6, keep)
        expected = set()
        for start in (0, 6):
            group = [i for i in range(start, start + 6) if rewards[i] == rewards[i]]
            mean = sum(rewards[i] for i in group) / max(len(group), 1)
            right = sorted(
                (i for i in group if rewards[i] > mean), key=lambda i: (not is_score(process[i]), -process[i])
            )
            others = sorted(
                (i for i in group if rewards[i] <= mean), key=lambda i: (not is_score(process[i]), process[i])
            )
            size = min(max(2, round(keep * 6)), len(group))
            counts = [(a, size - a) for a in range(len(right) + 1) if 0 <= size - a <= len(others)]
            num_right, num_others = min(counts, key=lambda count: abs(count[0] - count[1]))
            expected |= {*right[:num_right], *others[:num_others]}
        assert set(ours.nonzero().flatten().tolist()) == expected
