import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.objective.loss import (
    LOSS_TYPES,
    aggregate,
    bounded_old_logps,
    gspo_token_old_logps,
    importance_ratio,
    live_group_scale,
    policy_loss,
    token_weights,
)

from .reference import numpy_aggregate, numpy_policy_loss


def random_batch(seed=0, rows=4, length=6):
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(rows, length, generator=generator)
    old_logps = logps + 0.5 * torch.randn(rows, length, generator=generator)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return logps, old_logps, mask


class TestRatio:
    def test_levels_in_value(self):
        logps, old_logps, mask = random_batch()
        lengths = mask.sum(1)
        token = importance_ratio(logps, old_logps, mask)
        sequence = importance_ratio(logps, old_logps, mask, "sequence")
        sequence_token = importance_ratio(logps, old_logps, mask, "sequence_token")
        for i, length in enumerate(lengths):
            probabilities = np.exp((logps - old_logps)[i, :length].double().numpy())
            np.testing.assert_allclose(token[i, :length], probabilities, rtol=1e-5)
            geometric_mean = probabilities.prod() ** (1 / length.item())
            np.testing.assert_allclose(sequence[i].item(), geometric_mean, rtol=1e-5)
            np.testing.assert_allclose(sequence_token[i, :length], geometric_mean, rtol=1e-5)
        assert token.shape == sequence_token.shape == (4, 6)
        assert sequence.shape == (4, 1)

    def test_gspo_token_has_the_gradient_of_gspo_where_advantages_are_equal(self):
        # GSPO, 4.3: with one advantage for all tokens of a completion both objectives have the same gradient
        logps, old_logps, mask = random_batch()
        advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
        gradients = []
        for level in ("sequence", "sequence_token"):
            leaf = logps.clone().requires_grad_()
            ratio = importance_ratio(leaf, old_logps, mask, level)
            loss = aggregate((policy_loss(ratio, advantages) * torch.ones_like(mask)), mask, "grpo")
            gradients.append(torch.autograd.grad(loss, leaf)[0])
        torch.testing.assert_close(*gradients)
        assert gradients[0].abs().max() > 0.01

    def test_gspo_token_keeps_token_advantages_apart(self):
        # The sequence ratio's gradient gives every token the mean advantage of its completion; the token form its own.
        logps, old_logps, mask = random_batch()
        mask = torch.ones_like(mask)
        advantages = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        leaf = logps.clone().requires_grad_()
        ratio = importance_ratio(leaf, old_logps, mask, "sequence_token")
        (gradient,) = torch.autograd.grad((ratio * advantages).sum(), leaf)
        torch.testing.assert_close(gradient, ratio.detach() * advantages)
        ratio = importance_ratio(leaf, old_logps, mask, "sequence")
        (gradient,) = torch.autograd.grad((ratio * advantages).sum(), leaf)
        mixed = ratio.detach() * advantages.mean(1, keepdim=True).expand_as(gradient)
        torch.testing.assert_close(gradient, mixed)

    @pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
    @pytest.mark.parametrize("gap", [150.0, -150.0])
    @pytest.mark.parametrize("masked", [True, False])
    def test_large_gaps_have_a_finite_loss_and_gradient(self, level, gap, masked):
        logps = torch.tensor([[-1.0, -1.0 + gap]], requires_grad=True)
        mask = torch.tensor([[1, 0 if masked else 1]])
        ratio = importance_ratio(logps, torch.full((1, 2), -1.0), mask, level)
        for advantage in (1.0, -1.0):
            loss = aggregate(policy_loss(ratio, torch.tensor([[advantage]])) * torch.ones_like(mask), mask, "grpo")
            (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
            assert loss.isfinite()
            assert gradient.isfinite().all()

    def test_old_logps_within_the_bound_stay_where_they_are(self):
        logps, old_logps, mask = random_batch()
        bounded = bounded_old_logps(logps, old_logps, mask)
        torch.testing.assert_close(bounded[mask.bool()], old_logps[mask.bool()])
        assert torch.equal(bounded[~mask.bool()], logps[~mask.bool()])
        assert bounded_old_logps(logps, logps - 150, mask)[0, 0] == logps[0, 0] - 10

    def test_gspo_token_old_logps_carry_no_gradient(self):
        logps, old_logps, mask = random_batch()
        assert not gspo_token_old_logps(logps.requires_grad_(), old_logps, mask).requires_grad

    def test_an_unknown_level_is_refused(self):
        with pytest.raises(ValueError, match="`level` is 'word', but must be one of 'token', 'sequence'"):
            importance_ratio(*random_batch(), "word")


class TestPolicyLoss:
    @settings(max_examples=200, deadline=None)
    @given(
        st.floats(0.0625, 5, width=32),
        st.floats(-3, 3, width=32),
        st.sampled_from([(0.2, None, None), (0.2, 0.28, None), (0.2, 0.28, 2.0), (0.1, 0.3, 4.0)]),
    )
    def test_equals_the_formula(self, ratio, advantage, clip):
        low, high, delta = clip
        ours = policy_loss(torch.tensor([[ratio]]), torch.tensor([[advantage]]), low, high, delta)
        theirs = numpy_policy_loss(ratio, advantage, low, low if high is None else high, delta)
        assert ours.item() == pytest.approx(theirs, rel=1e-5, abs=1e-6)


class TestAggregate:
    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_equals_the_formula_by_loops(self, loss_type, data):
        rows, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        numbers = st.floats(-4, 4, width=32)
        per_token = [[data.draw(numbers) for _ in range(length)] for _ in range(rows)]
        mask = [[data.draw(st.sampled_from([0, 1])) for _ in range(length)] for _ in range(rows)]
        ours = aggregate(torch.tensor(per_token), torch.tensor(mask), loss_type, max_completion_length=9)
        theirs = numpy_aggregate(per_token, mask, loss_type, 9)
        assert ours.item() == pytest.approx(theirs, rel=1e-4, abs=1e-5)

    @pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
    def test_with_a_global_normalizer_it_does_not_depend_on_how_the_batch_is_cut(self, loss_type):
        logps, _, mask = random_batch(rows=12)
        whole = aggregate(logps, mask, loss_type, max_completion_length=9)
        normalizer = {"grpo": 12, "sapo": 12, "luspo": 12, "dr_grpo": 12 * 9}.get(loss_type, mask.sum())
        for size in (1, 3, 4, 6):
            parts = [
                aggregate(part, part_mask, loss_type, normalizer=normalizer)
                for part, part_mask in zip(logps.split(size), mask.split(size), strict=True)
            ]
            torch.testing.assert_close(torch.stack(parts).sum(), whole)

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_what_a_masked_token_holds_does_not_count(self, loss_type):
        logps, _, mask = random_batch()
        spoilt = logps.masked_fill(mask == 0, float("nan")).requires_grad_()
        loss = aggregate(spoilt, mask, loss_type, max_completion_length=9)
        assert loss == aggregate(logps, mask, loss_type, max_completion_length=9)
        assert torch.autograd.grad(loss, spoilt)[0].isfinite().all()

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_an_empty_batch_is_zero(self, loss_type):
        assert aggregate(torch.zeros(2, 0), torch.zeros(2, 0), loss_type, max_completion_length=9) == 0

    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_token_weights_are_its_derivative(self, loss_type):
        logps, _, mask = random_batch()
        leaf = logps.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(aggregate(leaf, mask, loss_type, normalizer=7.0), leaf)
        torch.testing.assert_close(token_weights(mask, loss_type, 7.0), gradient)

    def test_refusals(self):
        with pytest.raises(ValueError, match="`loss_type` is 'ppo', but must be one of"):
            aggregate(torch.zeros(1, 1), torch.ones(1, 1), "ppo")
        with pytest.raises(ValueError, match="`max_completion_length` is missing"):
            aggregate(torch.zeros(1, 1), torch.ones(1, 1), "dr_grpo")


class TestLiveGroupScale:
    def test_counts_completions_or_tokens(self):
        is_live = torch.tensor([True, True, False, False, False, False])
        lengths = torch.tensor([3, 5, 10, 2, 2, 2])
        assert live_group_scale(is_live, lengths, "grpo") == 3
        assert live_group_scale(is_live, lengths, "dapo") == 24 / 8
        assert live_group_scale(is_live[2:], lengths[2:], "dapo") == 1
