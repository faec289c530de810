"""Autograd of each method's objective equals coefficient times gradient of the log probability, on a small model."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from trl_grpo_ext.objective import gradient_coefficient, outcome_advantages, process_advantages
from trl_grpo_ext.objective.kl import kl_penalty
from trl_grpo_ext.objective.loss import aggregate, importance_ratio, policy_loss


ROWS, LENGTH = 4, 6
MASK = (torch.arange(LENGTH) < torch.tensor([6, 3, 5, 2])[:, None]).long()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 17, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def logps_of(model, ids):
    logits = model(ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def noisy(logps, scale, seed):
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed), dtype=logps.dtype)
    return logps.detach() + scale * noise


def weight_gradient(model, value):
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def eq_5(model, ids, coefficient, mask):
    """The right-hand side of Eq. 5: mean over completions and their tokens of GC times grad log pi."""
    weighted = coefficient.detach() * logps_of(model, ids)
    return weight_gradient(model, ((weighted * mask).sum(1) / mask.sum(1)).mean())


def assert_same_gradient(ours, expected):
    assert expected.norm() > 1e-4
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


ADVANTAGES = {
    "outcome": outcome_advantages(torch.tensor([1.0, 0.0, 0.3, 0.6]), 4)[:, None],
    "process": process_advantages(
        [[1.0, 0.0], [0.5], [0.2, None, 0.9], [0.7]], [[2, 5], [2], [0, 2, 4], [1]], 4, LENGTH
    ),
}
STALENESS = {"on-policy": 0.0, "off-policy": 0.3}


@pytest.mark.parametrize("staleness", STALENESS)
class TestPolicyGradientMethods:
    @pytest.mark.parametrize("supervision", ADVANTAGES)
    def test_grpo(self, model, ids, supervision, staleness):
        logps = logps_of(model, ids)
        old_logps, ref_logps = noisy(logps, STALENESS[staleness], 2), noisy(logps, 0.5, 3)
        advantages = ADVANTAGES[supervision]
        ratio = importance_ratio(logps, old_logps, MASK)
        per_token = policy_loss(ratio, advantages) + 0.04 * kl_penalty(logps, ref_logps)
        ours = weight_gradient(model, -aggregate(per_token, MASK, "grpo"))
        coefficient = gradient_coefficient.grpo(advantages, logps, old_logps, ref_logps, MASK)
        assert_same_gradient(ours, eq_5(model, ids, coefficient, MASK))

    def test_ppo(self, model, ids, staleness):
        logps = logps_of(model, ids)
        old_logps = noisy(logps, STALENESS[staleness], 2)
        advantages = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(4))
        per_token = policy_loss(importance_ratio(logps, old_logps, MASK), advantages, 0.2, 0.28)
        ours = weight_gradient(model, -aggregate(per_token, MASK, "grpo"))
        coefficient = gradient_coefficient.ppo(advantages, logps, old_logps, MASK, 0.2, 0.28)
        assert_same_gradient(ours, eq_5(model, ids, coefficient, MASK))
        is_clipped = (coefficient == 0) & (advantages != 0) & MASK.bool()
        assert is_clipped.any() == (staleness == "off-policy")

    def test_online_rft(self, model, ids, staleness):
        correct = torch.tensor([True, False, True, False])
        logps = logps_of(model, ids)
        old_logps = noisy(logps, STALENESS[staleness], 2)
        advantages = outcome_advantages(correct.float(), 4, baseline="none", scale="none")[:, None]
        per_token = policy_loss(importance_ratio(logps, old_logps, MASK), advantages)
        ours = weight_gradient(model, -aggregate(per_token, MASK, "grpo"))
        coefficient = gradient_coefficient.online_rft(correct, MASK)
        if staleness == "off-policy":  # the paper's GC is the on-policy one; the ratio comes on top of it
            coefficient = gradient_coefficient.ppo(advantages, logps, old_logps, MASK)
        assert_same_gradient(ours, eq_5(model, ids, coefficient, MASK))


class TestSupervisedMethods:
    def test_sft(self, model, ids):
        logps = logps_of(model, ids)
        objective = ((logps * MASK).sum(1) / MASK.sum(1)).mean()
        ours = weight_gradient(model, objective)
        assert_same_gradient(ours, eq_5(model, ids, gradient_coefficient.sft(MASK), MASK))

    def test_rft(self, model, ids):
        correct = torch.tensor([True, False, True, False])
        logps = logps_of(model, ids)
        objective = (correct * (logps * MASK).sum(1) / MASK.sum(1)).mean()
        ours = weight_gradient(model, objective)
        assert_same_gradient(ours, eq_5(model, ids, gradient_coefficient.rft(correct, MASK), MASK))

    @pytest.mark.parametrize("drift", [0.0, 1.0])
    def test_dpo_is_the_gradient_of_eq_12_for_completions_of_unequal_length(self, model, ids, drift):
        beta, chosen, rejected = 0.7, slice(0, 2), slice(2, 4)
        logps = logps_of(model, ids)
        ref_logps = noisy(logps, drift, 5)
        means = ((logps - ref_logps) * MASK).sum(1) / MASK.sum(1)
        objective = torch.nn.functional.logsigmoid(beta * means[chosen] - beta * means[rejected]).sum()
        ours = weight_gradient(model, objective)
        coefficients = gradient_coefficient.dpo(
            logps[chosen], ref_logps[chosen], MASK[chosen], logps[rejected], ref_logps[rejected], MASK[rejected], beta
        )
        expected = ROWS * eq_5(model, ids, torch.cat(coefficients), MASK)  # a sum over pairs, not a mean over rows
        assert_same_gradient(ours, expected)


NUMBERS = st.floats(-3, 3, width=32)


@st.composite
def tokens(draw):
    """Ragged rows of advantages and log probabilities, and what the mask keeps of them."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    cells = [[[draw(NUMBERS) for _ in range(length)] for _ in range(rows)] for _ in range(4)]
    mask = [[int(t < draw(st.integers(1, length))) for t in range(length)] for _ in range(rows)]
    return [torch.tensor(cell) for cell in cells], torch.tensor(mask)


class TestAgainstFloat64:
    @settings(max_examples=100, deadline=None)
    @given(tokens(), st.sampled_from([(0.2, None), (0.2, 0.28), (0.01, 0.01)]))
    def test_ppo_and_grpo(self, case, clip):
        (advantages, logps, old_logps, ref_logps), mask = case
        low, high = clip[0], clip[0] if clip[1] is None else clip[1]
        ppo = gradient_coefficient.ppo(advantages, logps, old_logps, mask, *clip)
        grpo = gradient_coefficient.grpo(advantages, logps, old_logps, ref_logps, mask, 0.3, *clip)
        for i, t in itertools.product(*map(range, mask.shape)):
            a, new, old, ref = (x[i, t].double().item() for x in (advantages, logps, old_logps, ref_logps))
            ratio = math.exp(new - old)
            if any(abs(ratio - bound) < 1e-5 for bound in (1 - low, 1 + high)):
                continue  # on the edge of the clip, where float32 may round either way
            is_cut = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
            expected = 0.0 if is_cut or not mask[i, t] else ratio * a
            assert ppo[i, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
            expected += 0.3 * (math.exp(ref - new) - 1) if mask[i, t] else 0.0
            assert grpo[i, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)

    @settings(max_examples=100, deadline=None)
    @given(tokens(), st.floats(0.0625, 2, width=32))
    def test_dpo(self, case, beta):
        (chosen, chosen_ref, rejected, rejected_ref), mask = case
        better, worse = gradient_coefficient.dpo(chosen, chosen_ref, mask, rejected, rejected_ref, mask, beta)
        for i, row in enumerate(mask.tolist()):
            own = [t for t, is_own in enumerate(row) if is_own]

            def mean_gap(logps, ref, i=i, own=own):
                gaps = [(logps[i, t].double() - ref[i, t].double()).item() for t in own]
                return sum(gaps) / max(len(gaps), 1)

            margin = beta * (mean_gap(chosen, chosen_ref) - mean_gap(rejected, rejected_ref))
            expected = beta / (1 + math.exp(margin))
            for t, is_own in enumerate(row):
                assert better[i, t].item() == pytest.approx(expected * is_own, rel=1e-4, abs=1e-6)
                assert worse[i, t].item() == pytest.approx(-expected * is_own, rel=1e-4, abs=1e-6)
