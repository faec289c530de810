"""
Values of the estimators against float64, their gradients by exact enumeration of a small policy.

The small policy writes two tokens of a vocabulary of three, the second depending on the first, so that every
completion can be enumerated and expectations are exact.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.objective.kl import (
    ESTIMATORS,
    EXPECTED_GRADIENT,
    GRADIENTS,
    LARGEST_EXPONENT,
    PLACEMENTS,
    adapted_coefficient,
    check_kl,
    credit_kl,
    exact_kl,
    kl_divergence,
    kl_penalty,
)
from trl_grpo_ext.objective.loss import importance_ratio

from .reference import numpy_kl


VOCABULARY = 3
FIRST = torch.arange(VOCABULARY).repeat_interleave(VOCABULARY)  # every completion of two tokens
SECOND = torch.arange(VOCABULARY).repeat(VOCABULARY)
MASK = torch.ones(VOCABULARY**2, 2)
GAPS = st.floats(-9, 9, width=32)


def random_policy(seed):
    """Logits of the first token, and of the second given each first one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


def all_logps(policy):
    """Log probabilities of the whole vocabulary at both tokens of every completion, (9, 2, 3)."""
    logps = policy.log_softmax(-1)
    return torch.stack([logps[0].expand(VOCABULARY**2, -1), logps[1 + FIRST]], dim=1)


def sampled_logps(policy):
    ids = torch.stack([FIRST, SECOND], dim=1)
    return all_logps(policy).gather(-1, ids[..., None]).squeeze(-1)


def sequence_kl(policy, reference):
    """Reverse KL of whole completions, without any estimate."""
    logps, ref_logps = sampled_logps(policy).sum(1), sampled_logps(reference).sum(1)
    return (logps.exp() * (logps - ref_logps)).sum()


def gradient_of(function, policy):
    policy = policy.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(policy), policy)
    return gradient


def expected_gradient(policy, reference, estimator, placement, gradient, credit="suffix"):
    """Expected gradient of the penalty as the trainer applies it, over all completions, on-policy."""
    policy = policy.clone().requires_grad_()
    logps, ref_logps = sampled_logps(policy), sampled_logps(reference)
    full = [all_logps(p) for p in (policy, reference)]
    ratio = importance_ratio(logps, logps.detach(), MASK).double()
    per_token = torch.zeros_like(logps)
    if placement in ("loss", "both"):
        per_token = (
            kl_divergence(*full, "exact").double()
            if estimator == "exact"
            else kl_penalty(logps, ref_logps, estimator, gradient, ratio).double()
        )
    if placement in ("reward", "both"):
        kl = kl_divergence(*full, "exact") if estimator == "exact" else kl_divergence(logps, ref_logps, estimator)
        per_token = per_token + ratio * credit_kl(kl.detach(), MASK, credit).double()
    probability = logps.detach().sum(1).exp()
    (gradient,) = torch.autograd.grad((probability * per_token.sum(1)).sum(), policy)
    return gradient


def token_kl_gradient(policy, reference, forward=False):
    """Gradient of the KL at each token given its prefix, the prefixes' own probabilities held fixed."""

    def divergence(p):
        prefix = p.detach().log_softmax(-1).exp()[0]  # of the second token; the first has none
        ours, theirs = p.log_softmax(-1), reference.log_softmax(-1)
        kl = theirs.exp() * (theirs - ours) if forward else ours.exp() * (ours - theirs)
        return kl[0].sum() + (prefix * kl[1:].sum(-1)).sum()

    return gradient_of(divergence, policy)


def relative_error(gradient, expected):
    return ((gradient - expected).norm() / expected.norm()).item()


class TestValues:
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.floats(-20, 0, width=32), GAPS), min_size=1, max_size=8))
    def test_equal_the_formula_in_float64(self, estimator, pairs):
        ref = torch.tensor([[ref for ref, _ in pairs]])
        logps = torch.tensor([[ref + gap for ref, gap in pairs]])
        ours = kl_divergence(logps, ref, estimator)
        expected = numpy_kl(logps.numpy(), ref.numpy(), estimator)
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-6)

    def test_k3_is_never_negative_on_rounding_noise(self):
        # exp(d) - d - 1 as it stands is negative for one in ten of such gaps
        gaps = 1e-4 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        naive = gaps.exp() - gaps - 1
        assert (naive < 0).float().mean() > 0.05
        k3 = kl_divergence(-gaps[None], torch.zeros(1, 10_000))
        assert (k3 >= 0).all()
        np.testing.assert_allclose(k3[0].numpy(), numpy_kl(-gaps.numpy(), 0, "k3"), rtol=1e-2, atol=1e-11)

    def test_exact_is_the_sum_over_the_vocabulary(self):
        policy, reference = random_policy(0), random_policy(1)
        p, q = (all_logps(logits).exp().numpy() for logits in (policy, reference))
        expected = (p * np.log(p / q)).sum(-1)
        ours = kl_divergence(all_logps(policy), all_logps(reference), "exact")
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4)

    def test_exact_takes_tokens_that_are_impossible(self):
        logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
        kl = kl_divergence(logits.log_softmax(-1), torch.zeros(1, 1, 3).log_softmax(-1), "exact")
        kl.sum().backward()
        assert kl.isfinite().all()
        assert logits.grad.isfinite().all()

    def test_half_precision_is_computed_in_float32(self):
        logps, ref = torch.tensor([[-1.0, -7.03125]]), torch.tensor([[-1.0078125, -7.0]])
        assert torch.equal(kl_divergence(logps.bfloat16(), ref.bfloat16()), kl_divergence(logps, ref))

    @pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
    def test_chunks_change_nothing(self, chunk_size):
        generator = torch.Generator().manual_seed(0)
        hidden, ref_hidden = torch.randn(2, 7, 4, generator=generator)
        head, ref_head = (torch.nn.Linear(4, 11) for _ in range(2))
        expected_hidden, ours_hidden = (hidden.clone().requires_grad_() for _ in range(2))
        expected = kl_divergence(
            head(expected_hidden).log_softmax(-1), ref_head(ref_hidden).detach().log_softmax(-1), "exact"
        )
        expected.sum().backward()
        expected_weight_grad = head.weight.grad.clone()
        head.weight.grad = None
        ours = exact_kl(ours_hidden, ref_hidden, head, ref_head, chunk_size)
        ours.sum().backward()
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(ours_hidden.grad, expected_hidden.grad)
        torch.testing.assert_close(head.weight.grad, expected_weight_grad)
        assert ref_head.weight.grad is None

    def test_an_unknown_estimator_is_refused(self):
        with pytest.raises(ValueError, match="`estimator` is 'k4', but must be one of 'k1', 'k2', 'k3', 'abs'"):
            kl_divergence(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


class TestLargeGaps:
    @pytest.mark.parametrize("gap", [150.0, -150.0])
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
    @pytest.mark.parametrize("gradient", GRADIENTS)
    def test_loss_and_gradient_are_finite(self, gap, estimator, gradient):
        logps = torch.tensor([[-1.0, -1.0 + gap]], requires_grad=True)
        ref = torch.full((1, 2), -1.0)
        ratio = importance_ratio(logps, ref, torch.ones(1, 2))
        penalty = kl_penalty(logps, ref, estimator, gradient, ratio)
        penalty.sum().backward()
        assert penalty.isfinite().all()
        assert logps.grad.isfinite().all()

    def test_a_gap_is_pulled_back_however_large(self):
        # A clamp of the value at 10 would stop pulling from a gap of 2.7 nats on.
        for gap in (2.7, 5.0, 20.0, 150.0):
            logps = torch.tensor([[-gap]], requires_grad=True)
            kl_divergence(logps, torch.zeros(1, 1)).sum().backward()
            expected = 1 - math.exp(min(gap, LARGEST_EXPONENT))  # the derivative of Eq. 4, bounded
            assert logps.grad.item() == pytest.approx(expected, rel=1e-5)


class TestExpectedGradients:
    """What each combination descends, against gradients of the divergences themselves."""

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("combination", EXPECTED_GRADIENT)
    def test_is_what_the_table_says(self, combination, seed):
        policy, reference = random_policy(seed), random_policy(seed + 100)
        expected = {
            "sequence": lambda: gradient_of(lambda p: sequence_kl(p, reference), policy),
            "token": lambda: token_kl_gradient(policy, reference),
            "forward": lambda: token_kl_gradient(policy, reference, forward=True),
        }[EXPECTED_GRADIENT[combination]]()
        assert relative_error(expected_gradient(policy, reference, *combination), expected) < 1e-6

    @pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
    @pytest.mark.parametrize("credit", ["suffix", "sequence"])
    def test_both_credits_are_exact_for_the_sequence(self, estimator, credit):
        policy, reference = random_policy(0), random_policy(100)
        expected = gradient_of(lambda p: sequence_kl(p, reference), policy)
        gradient = expected_gradient(policy, reference, estimator, "both", "naive", credit)
        assert relative_error(gradient, expected) < 1e-6

    @pytest.mark.parametrize(
        "combination",
        [
            ("k1", "loss", "naive"),
            ("k2", "loss", "importance_weighted"),
            ("k2", "reward", "naive"),
            ("k3", "reward", "naive"),
            ("exact", "reward", "naive"),
            ("k2", "both", "naive"),
            ("k1", "both", "straight_through"),
            ("k3", "both", "importance_weighted"),
        ],
    )
    def test_what_is_refused_descends_no_divergence(self, combination):
        policy, reference = random_policy(0), random_policy(100)
        gradient = expected_gradient(policy, reference, *combination)
        for expected in (
            gradient_of(lambda p: sequence_kl(p, reference), policy),
            token_kl_gradient(policy, reference),
            token_kl_gradient(policy, reference, forward=True),
        ):
            assert relative_error(gradient, expected) > 0.1

    def test_naive_k1_in_the_loss_has_no_expected_gradient(self):
        gradient = expected_gradient(random_policy(0), random_policy(100), "k1", "loss", "naive")
        assert gradient.abs().max() < 1e-6  # so its relative error to any divergence's gradient is 1

    def test_per_token_gradients_ignore_that_a_token_changes_later_divergence(self):
        policy, reference = random_policy(0), random_policy(100)
        expected = gradient_of(lambda p: sequence_kl(p, reference), policy)
        per_token = relative_error(expected_gradient(policy, reference, "k2", "loss", "naive"), expected)
        for combination in (("k3", "loss", "importance_weighted"), ("exact", "loss", "naive")):
            assert relative_error(expected_gradient(policy, reference, *combination), expected) == pytest.approx(
                per_token, rel=1e-5
            )
        paper = relative_error(expected_gradient(policy, reference, "k3", "loss", "naive"), expected)
        assert 1e-3 < per_token < paper

    @pytest.mark.parametrize(("seed", "per_token", "paper"), [(715, 4, 49), (1, 34, 56), (3, 27, 36)])
    def test_how_far_off_they_are_depends_on_the_policy(self, seed, per_token, paper):
        """In percent of the sequence's gradient: k2 per token, and the paper's naive k3."""
        policy, reference = random_policy(seed), random_policy(seed + 100)
        expected = gradient_of(lambda p: sequence_kl(p, reference), policy)
        for estimator, error in (("k2", per_token), ("k3", paper)):
            gradient = expected_gradient(policy, reference, estimator, "loss", "naive")
            assert round(100 * relative_error(gradient, expected)) == error

    @pytest.mark.parametrize("combination", EXPECTED_GRADIENT)
    def test_steps_on_it_alone_reduce_the_exact_divergence(self, combination):
        policy, reference = random_policy(0), random_policy(100)
        before = sequence_kl(policy, reference)
        for _ in range(300):
            policy = policy - 0.1 * expected_gradient(policy, reference, *combination)
        assert sequence_kl(policy, reference) < 0.05 * before


class TestRefusals:
    def test_every_combination_is_either_in_the_table_or_refused_with_a_reason(self):
        for estimator in ESTIMATORS:
            for placement in PLACEMENTS:
                for gradient in GRADIENTS:
                    if (estimator, placement, gradient) in EXPECTED_GRADIENT:
                        check_kl(estimator, placement, gradient)
                    else:
                        with pytest.raises(ValueError, match=f"`kl_estimator` '{estimator}' with .*; (use|leave)|abs"):
                            check_kl(estimator, placement, gradient)

    @pytest.mark.parametrize(
        ("combination", "message"),
        [
            (("k4", "loss", "naive"), "`kl_estimator` is 'k4', but must be one of"),
            (("k3", "score", "naive"), "`kl_placement` is 'score', but must be one of"),
            (("k3", "loss", "free"), "`kl_gradient` is 'free', but must be one of"),
            (("k1", "loss", "naive"), "has an expected gradient of zero"),
            (("abs", "loss", "naive"), "is for monitoring only"),
            (("k3", "reward", "naive"), "does not descend the KL; use 'k1'"),
            (("k2", "both", "naive"), "since the value of k2 is not the KL's"),
            (("k2", "loss", "importance_weighted"), "has another gradient than the KL"),
            (("k2", "loss", "straight_through"), "has the right gradient by itself"),
            (("exact", "loss", "importance_weighted"), "has the right gradient by itself"),
            (("exact", "reward", "naive"), "lacks the gradient of the KL at the token itself"),
            (("k1", "reward", "straight_through"), "has no gradient to choose"),
            (("k3", "both", "straight_through"), "counts the penalty twice"),
        ],
    )
    def test_reasons(self, combination, message):
        with pytest.raises(ValueError, match=message):
            check_kl(*combination)


class TestCredit:
    def test_suffix_and_sequence(self):
        kl = torch.tensor([[1.0, 2.0, 4.0, float("nan")]])
        mask = torch.tensor([[1, 0, 1, 0]])
        assert credit_kl(kl, mask).tolist() == [[5, 0, 4, 0]]
        assert credit_kl(kl, mask, "sequence").tolist() == [[5, 0, 5, 0]]
        with pytest.raises(ValueError, match="`credit` is 'token', but must be one of 'suffix', 'sequence'"):
            credit_kl(kl, mask, "token")


class TestAdaptedCoefficient:
    @pytest.mark.parametrize(
        ("kl", "expected"),
        [(0.1, 0.04), (0.11, 0.04 * (1 + 0.1 * 256 / 1024)), (9.0, 0.04 * 1.05), (0.0, 0.04 * 0.95)],
    )
    def test_moves_towards_the_target(self, kl, expected):
        assert adapted_coefficient(0.04, kl, 0.1, 1024, 256) == pytest.approx(expected)
