"""The trainer's loss with our options on, against formulas on a plain forward pass and against TRL."""

import json
import math

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext.objective import gradient_coefficient
from trl_grpo_ext.objective.kl import EXPECTED_GRADIENT, credit_kl, kl_divergence
from trl_grpo_ext.objective.loss import LOSS_TYPES, aggregate, importance_ratio, policy_loss

from ..tiny import prompt_dataset, save_tiny_model
from .helpers import (
    assert_equal_weights,
    completion_logits,
    completion_logps,
    generation_batch,
    length_reward,
    make_trainer,
    process_options,
    weight_gradient,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def shift_reference(trainer, scale=0.3):
    """Move the reference away from the policy, so that their divergence is no 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)


def scored_batch(trainer, staleness=0.0):
    """A generation batch against a shifted reference, sampled by a policy `staleness` away from the present one."""
    shift_reference(trainer)
    batch = dict(generation_batch(trainer))
    if staleness:
        logps = completion_logps(trainer.model, batch).detach()
        noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
        batch["old_per_token_logps"] = logps + staleness * noise
    trainer.current_gradient_accumulation_steps = 1
    return batch


def gradient_of_loss(trainer, batch):
    loss = trainer._compute_loss(trainer.model, dict(batch))
    return loss.item(), weight_gradient(trainer.model, loss)


def level_of(loss_type):
    return {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}


class TestKLInTheLoss:
    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    @pytest.mark.parametrize("gradient", ["naive", "importance_weighted"])
    @pytest.mark.parametrize("staleness", [0.0, 0.3])
    def test_k3_equals_trl(self, tmp_path, model_path, tokenizer, loss_type, gradient, staleness):
        options = {"loss_type": loss_type, "beta": 0.5, **level_of(loss_type)}
        ours = make_trainer(tmp_path, model_path, prompt_dataset(), tokenizer, kl_gradient=gradient, **options)
        theirs = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, GRPOTrainer, GRPOConfig,
            use_bias_correction_kl=gradient == "importance_weighted", **options,
        )  # fmt: skip
        batch = scored_batch(ours, staleness)
        theirs.current_gradient_accumulation_steps = 1
        theirs.model.train()
        loss, gradient = gradient_of_loss(ours, batch)
        expected_loss, expected_gradient = gradient_of_loss(theirs, batch)
        assert loss == pytest.approx(expected_loss, rel=5e-6, abs=5e-7)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
        assert ours._metrics["train"]["kl"] == pytest.approx(theirs._metrics["train"]["kl"], rel=1e-4)

    @pytest.mark.parametrize("combination", EXPECTED_GRADIENT)
    def test_every_combination_trains_and_differs_from_the_default(self, tmp_path, model_path, tokenizer, combination):
        estimator, placement, gradient = combination
        options = {"beta": 2.0, "loss_type": "grpo"}
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer,
            kl_estimator=estimator, kl_placement=placement, kl_gradient=gradient, **options,
        )  # fmt: skip
        batch = scored_batch(trainer)
        plain = make_trainer(tmp_path, model_path, prompt_dataset(), tokenizer, **options)
        plain.current_gradient_accumulation_steps = 1
        plain.model.train()
        _, gradient = gradient_of_loss(trainer, batch)
        _, default = gradient_of_loss(plain, batch)
        assert gradient.isfinite().all()
        # TRL's default is k3 in the loss, weighted by importance; straight-through has the same gradient on-policy
        same = estimator == "k3" and placement == "loss" and combination[2] != "naive"
        same = same or combination in (("k2", "loss", "naive"), ("k1", "loss", "straight_through"))
        assert ((gradient - default).norm() < 1e-4 * default.norm()) == same

    def test_straight_through_has_the_value_of_the_estimator(self, tmp_path, model_path, tokenizer):
        losses = {}
        for gradient in ("naive", "straight_through"):
            trainer = make_trainer(tmp_path, model_path, prompt_dataset(), tokenizer, beta=2.0, kl_gradient=gradient)
            losses[gradient], _ = gradient_of_loss(trainer, scored_batch(trainer))
        assert losses["naive"] == pytest.approx(losses["straight_through"])

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_exact_is_the_sum_over_the_vocabulary(self, tmp_path, model_path, tokenizer, temperature):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=2.0, kl_estimator="exact", loss_type="grpo",
            temperature=temperature,
        )  # fmt: skip
        batch = scored_batch(trainer)
        _, gradient = gradient_of_loss(trainer, batch)
        logits = completion_logits(trainer.model, batch) / temperature
        logps = logits.log_softmax(-1)
        ref_logps = (completion_logits(trainer.ref_model, batch) / temperature).log_softmax(-1).detach()
        kl = (logps.exp() * (logps - ref_logps)).sum(-1)
        sampled = logps.gather(-1, batch["completion_ids"][..., None]).squeeze(-1)
        per_token = -(sampled - sampled.detach()).exp() * batch["advantages"][:, None] + 2.0 * kl
        mask = batch["completion_mask"]
        expected = weight_gradient(trainer.model, aggregate(per_token, mask, "grpo"))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        mean = ((kl * mask).sum() / mask.sum()).item()
        assert trainer._metrics["train"]["kl"][-1] == pytest.approx(mean, rel=1e-4)

    def test_exact_works_with_lora_whose_reference_is_the_base(self, tmp_path, model_path, tokenizer):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.5, kl_estimator="exact", max_steps=3,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), learning_rate=0.1,
        )  # fmt: skip
        trainer.train()
        kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert kl[0] == pytest.approx(0, abs=1e-6)
        assert kl[-1] > 1e-4

    def test_exact_refuses_what_it_does_not_know(self, tmp_path, model, tokenizer):
        model.config.logit_scale = 2.0
        with pytest.raises(
            ValueError, match="`kl_estimator` is 'exact', which does not know the model's `logit_scale`"
        ):
            make_trainer(
                tmp_path, model, prompt_dataset(), tokenizer, beta=0.1, kl_estimator="exact",
                peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
            )  # fmt: skip


class TestKLInTheReward:
    @pytest.mark.parametrize("credit", ["suffix", "sequence"])
    @pytest.mark.parametrize("supervision", ["outcome", "process"])
    @pytest.mark.parametrize("staleness", [0.0, 0.3])
    def test_enters_the_token_advantages(self, tmp_path, model_path, tokenizer, credit, supervision, staleness):
        process = process_options() if supervision == "process" else {}
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.5, kl_estimator="k1", kl_placement="reward",
            kl_credit=credit, loss_type="dapo", **process,
        )  # fmt: skip
        batch = scored_batch(trainer, staleness)
        _, gradient = gradient_of_loss(trainer, batch)
        mask = batch["completion_mask"]
        logps = completion_logps(trainer.model, batch)
        old_logps = batch.get("old_per_token_logps", logps.detach())
        kl = credit_kl(old_logps - batch["ref_per_token_logps"], mask, credit)
        advantages = batch["advantages"]
        advantages = (advantages if advantages.dim() == 2 else advantages[:, None]) - 0.5 * kl
        per_token = policy_loss(importance_ratio(logps, old_logps, mask), advantages)
        expected = weight_gradient(trainer.model, aggregate(per_token, mask, "dapo"))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)

    def test_the_batch_keeps_its_advantages_for_further_iterations(self, tmp_path, model_path, tokenizer):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.5, kl_estimator="k1", kl_placement="reward"
        )
        batch = scored_batch(trainer)
        first, _ = gradient_of_loss(trainer, batch)
        second, _ = gradient_of_loss(trainer, batch)
        assert batch["advantages"].dim() == 1
        assert first == second


class TestDivergenceFalls:
    @pytest.mark.parametrize("combination", EXPECTED_GRADIENT)
    def test_steps_on_the_kl_alone_lead_to_the_reference(self, tmp_path, model_path, tokenizer, combination):
        """With equal rewards only the KL pulls, and the exact divergence falls."""
        estimator, placement, gradient = combination
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, reward_funcs=lambda prompts, **_: [1.0] * len(prompts),
            beta=1.0, kl_estimator=estimator, kl_placement=placement, kl_gradient=gradient, max_steps=25,
            learning_rate=3e-3, per_device_train_batch_size=32, max_completion_length=6, loss_type="dr_grpo",
        )  # fmt: skip
        shift_reference(trainer, scale=0.2)

        def divergence():
            """Exact KL of the first token, mean over prompts."""
            batches = [
                {
                    "prompt_ids": torch.tensor([tokenizer.encode(prompt)]),
                    "prompt_mask": torch.ones(1, len(tokenizer.encode(prompt)), dtype=torch.long),
                    "completion_ids": torch.full((1, 1), tokenizer.eos_token_id),
                    "completion_mask": torch.ones(1, 1, dtype=torch.long),
                }
                for prompt in prompt_dataset()["prompt"]
            ]
            with torch.no_grad():
                logps = [
                    torch.cat([completion_logits(m, batch).log_softmax(-1) for batch in batches])
                    for m in (trainer.model, trainer.ref_model)
                ]
            return kl_divergence(*logps, "exact").mean().item()

        before = divergence()
        trainer.train()
        assert divergence() < 0.5 * before


class TestAdaptiveCoefficient:
    def test_follows_the_logged_divergence_and_survives_a_resume(self, tmp_path, model_path, tokenizer):
        options = {
            "beta": 0.1, "kl_target": 0.01, "kl_horizon": 16, "learning_rate": 1e-2, "save_strategy": "steps",
            "save_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2,
        }  # fmt: skip
        whole = make_trainer(tmp_path / "whole", model_path, prompt_dataset(32), tokenizer, **options)
        whole.train()
        logs = [entry for entry in whole.state.log_history if "kl" in entry]
        beta = 0.1
        for entry in logs:
            assert entry["kl_coefficient"] == pytest.approx(beta)
            error = min(max(entry["kl"] / 0.01 - 1, -0.2), 0.2)
            beta *= 1 + error * 16 / 16
        assert whole.beta == pytest.approx(beta, rel=1e-3)
        assert json.loads((tmp_path / "whole/checkpoint-4/kl_coefficient.json").read_text()) == {"beta": whole.beta}

        resumed = make_trainer(tmp_path / "resumed", model_path, prompt_dataset(32), tokenizer, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
        assert_equal_weights(resumed.model, whole.model)
        assert resumed.beta == whole.beta

    @pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k3", "both"), ("exact", "loss")])
    def test_works_for_every_placement(self, tmp_path, model_path, tokenizer, estimator, placement):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, kl_estimator=estimator, kl_placement=placement,
            beta=0.1, kl_target=10.0, kl_horizon=8,
        )  # fmt: skip
        trainer.train()
        assert trainer.beta == pytest.approx(0.1 * 0.8**2)  # far below its target, twice


class TestGSPOToken:
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
    def test_has_the_sequence_ratio_in_value_and_token_gradients(self, tmp_path, model_path, tokenizer, loss_type):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, loss_type=loss_type, epsilon=0.01,
            importance_sampling_level="sequence_token", beta=0.1, kl_gradient="naive", **process_options(),
        )  # fmt: skip
        batch = scored_batch(trainer, staleness=0.1)
        loss, gradient = gradient_of_loss(trainer, batch)
        mask, logps = batch["completion_mask"], completion_logps(trainer.model, batch)
        ratio = importance_ratio(logps, batch["old_per_token_logps"], mask, "sequence_token")
        per_token = policy_loss(ratio, batch["advantages"], 0.01)
        per_token = per_token + 0.1 * kl_divergence(logps, batch["ref_per_token_logps"])
        expected = aggregate(per_token, mask, loss_type)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient, weight_gradient(trainer.model, expected), rtol=1e-4, atol=1e-6)
        is_clipped = (ratio - 1).abs() > 0.01
        assert is_clipped.any()
        assert not is_clipped.all()

    def test_with_one_advantage_a_completion_it_is_gspo(self, tmp_path, model_path, tokenizer):
        options = {"loss_type": "grpo", "epsilon": 0.01}
        token = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, importance_sampling_level="sequence_token", **options
        )
        batch = dict(generation_batch(token))
        logps = completion_logps(token.model, batch).detach()
        batch["old_per_token_logps"] = logps + 0.1 * torch.randn(logps.shape)
        gspo = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, importance_sampling_level="sequence", **options
        )
        gspo.model.train()
        for trainer in (token, gspo):
            trainer.current_gradient_accumulation_steps = 1
        loss, gradient = gradient_of_loss(token, batch)
        expected_loss, expected_gradient = gradient_of_loss(gspo, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


class TestLargeLogRatios:
    @pytest.mark.parametrize("gap", [150.0, -150.0])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"])
    @pytest.mark.parametrize(
        "options",
        [
            {"kl_gradient": "naive"},
            {"kl_gradient": "importance_weighted"},
            {"kl_estimator": "k1", "kl_placement": "reward"},
            {"importance_sampling_level": "sequence_token", "kl_gradient": "naive"},
        ],
        ids=lambda options: "-".join(options.values()),
    )
    def test_loss_and_gradients_are_finite(self, tmp_path, model_path, tokenizer, gap, masked, loss_type, options):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.04, loss_type=loss_type, **options
        )
        batch = scored_batch(trainer)
        logps = completion_logps(trainer.model, batch).detach()
        where = (batch["completion_mask"] == 0) if masked else torch.ones_like(batch["completion_mask"]).bool()
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + gap * where
        batch["old_per_token_logps"] = logps - gap * where
        loss, gradient = gradient_of_loss(trainer, batch)
        assert math.isfinite(loss)
        assert gradient.isfinite().all()


class TestGradientCoefficient:
    @pytest.mark.parametrize("supervision", ["outcome", "process"])
    @pytest.mark.parametrize("staleness", [0.0, 0.3])
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
    def test_logs_that_of_eq_21(self, tmp_path, model_path, tokenizer, supervision, staleness, loss_type):
        process = process_options() if supervision == "process" else {}
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.5, use_bias_correction_kl=False,
            loss_type=loss_type, log_gradient_coefficient=True, **process,
        )  # fmt: skip
        batch = scored_batch(trainer, staleness)
        gradient_of_loss(trainer, batch)
        logps, mask = completion_logps(trainer.model, batch).detach(), batch["completion_mask"]
        advantages = batch["advantages"] if supervision == "process" else batch["advantages"][:, None]
        coefficients = gradient_coefficient.grpo(
            advantages, logps, batch.get("old_per_token_logps", logps), batch["ref_per_token_logps"], mask, beta=0.5
        )[mask.bool()]
        assert trainer._metrics["train"]["gradient_coefficient/mean"] == pytest.approx(
            [coefficients.mean().item()], rel=1e-3, abs=1e-5
        )
        assert trainer._metrics["train"]["gradient_coefficient/std"] == pytest.approx(
            [coefficients.std(correction=0).item()], rel=1e-3
        )

    def test_online_rft_is_grpo_with_another_coefficient(self, tmp_path, model_path, tokenizer):
        def correct(completion_ids, **kwargs):
            return [float(len(ids) % 2) for ids in completion_ids]

        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, reward_funcs=correct, advantage_baseline="none",
            scale_rewards="none", loss_type="grpo", log_gradient_coefficient=True,
        )  # fmt: skip
        batch = dict(generation_batch(trainer))
        trainer.current_gradient_accumulation_steps = 1
        _, gradient = gradient_of_loss(trainer, batch)
        mask = batch["completion_mask"]
        coefficients = gradient_coefficient.online_rft(batch["advantages"] == 1, mask)
        assert 0 < coefficients[mask.bool()].mean() < 1
        objective = (coefficients * completion_logps(trainer.model, batch)).sum(1) / mask.sum(1)
        expected = weight_gradient(trainer.model, -objective.mean())
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        assert trainer._metrics["train"]["gradient_coefficient/mean"] == pytest.approx(
            [coefficients[mask.bool()].mean().item()], rel=1e-4
        )

    def test_does_not_depend_on_the_cut_into_micro_batches(self, tmp_path, model_path, tokenizer):
        logged = []
        for size, accumulation in ((8, 1), (4, 2), (1, 8)):
            trainer = make_trainer(
                tmp_path, model_path, prompt_dataset(), tokenizer, per_device_train_batch_size=size, max_steps=1,
                gradient_accumulation_steps=accumulation, log_gradient_coefficient=True, loss_type="grpo",
            )  # fmt: skip
            trainer.train()
            log = trainer.state.log_history[0]
            logged.append([log["gradient_coefficient/mean"], log["gradient_coefficient/std"], log["grad_norm"]])
        for values in logged[1:]:
            assert values == pytest.approx(logged[0], rel=1e-4, abs=1e-6)

    def test_does_not_change_the_training(self, tmp_path, model_path, tokenizer):
        models = []
        for logged in (True, False):
            trainer = make_trainer(
                tmp_path, model_path, prompt_dataset(), tokenizer, beta=0.04, log_gradient_coefficient=logged
            )
            trainer.train()
            models.append(trainer.model)
        assert_equal_weights(*models)


class TestVLLMCorrection:
    """What vLLM sampled with another policy than the one that is trained is weighted, at each token."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"beta": 0.04, "kl_estimator": "k1", "kl_placement": "reward"},
            {"importance_sampling_level": "sequence_token"},
            {"efficient_microbatches": False},
        ],
        ids=["plain", "KL in the reward", "GSPO-token", "all rows as they are"],
    )
    def test_weights_token_advantages(self, tmp_path, model_path, tokenizer, options):
        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, **process_options(loss_type="grpo", **options)
        )
        batch = dict(generation_batch(trainer))
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # as where vLLM has sampled
        mask = batch["completion_mask"]
        torch.manual_seed(0)
        batch["importance_sampling_ratio"] = torch.rand(mask.shape) * 2
        _, gradient = gradient_of_loss(trainer, batch)
        # Eq. 3 at ratio 1, by hand; the reference is still the policy, so that the KL in the reward is 0
        weighted = completion_logps(trainer.model, batch) * batch["advantages"] * batch["importance_sampling_ratio"]
        expected = weight_gradient(trainer.model, -((weighted * mask).sum(1) / mask.sum(1)).mean())
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


class TestLiveGroups:
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "sapo", "cispo"])
    def test_loss_is_that_of_the_live_groups_alone(self, tmp_path, model_path, tokenizer, loss_type):
        def one_live_group(completion_ids, **kwargs):
            # TRL's own advantages of eight times 0.7 are not 0 but 6e-4
            return [*length_reward(completion_ids[:4]), *[0.7] * (len(completion_ids) - 4)]

        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, reward_funcs=one_live_group, loss_type=loss_type,
            per_device_train_batch_size=12, live_group_denominator=True,
        )  # fmt: skip
        batch = dict(generation_batch(trainer))
        trainer.current_gradient_accumulation_steps = 1
        loss, gradient = gradient_of_loss(trainer, batch)
        plain = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, loss_type=loss_type, reward_funcs=one_live_group
        )
        plain.current_gradient_accumulation_steps = 1
        plain.model.train()
        rewards = torch.tensor(length_reward([ids[:n].tolist() for ids, n in zip(
            batch["completion_ids"][:4], batch["completion_mask"][:4].sum(1), strict=True)]))  # fmt: skip
        live = {name: value[:4] for name, value in batch.items() if name != "num_items_in_batch"}
        live["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        live["num_items_in_batch"] = live["completion_mask"].sum()
        expected_loss, expected_gradient = gradient_of_loss(plain, live)
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)
        assert trainer._metrics["train"]["frac_groups_live"] == [pytest.approx(1 / 3)]
