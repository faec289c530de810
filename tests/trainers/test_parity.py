"""With every option of ours off, those that are on by default too, training is TRL's, bit for bit."""

import functools
import math

import pytest
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

from ..tiny import prompt_dataset, save_tiny_model
from .helpers import assert_equal_weights, bitwise_config, length_reward, log_without_timings, make_trainer


CASES = {
    "defaults": {},
    "paper": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo", "beta": 0.04, "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "batch scaling": {"scale_rewards": "batch"},
    "sequence level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 3},
    "truncated completions masked": {"mask_truncated_completions": True},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "beta": 0.04},
    "no scaling": {"scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4},
    "KL correction off the policy": {"beta": 0.04, "num_iterations": 2, "max_steps": 4},
    "KL as in the paper off the policy": {
        "beta": 0.04,
        "num_iterations": 2,
        "max_steps": 4,
        "use_bias_correction_kl": False,
    },
    "entropy bonus": {"entropy_coef": 0.01},
    "high-entropy tokens only": {"top_entropy_quantile": 0.5, "beta": 0.04},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "max_steps": 4},
    "two-sided clip": {"loss_type": "grpo", "delta": 1.5, "num_iterations": 2, "max_steps": 4},
    "clip-higher": {"epsilon_high": 0.28, "num_iterations": 2, "max_steps": 4},
    "more accumulation than generation": {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
    },
    "top-p": {"top_p": 0.9, "temperature": 0.7, "beta": 0.04},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", CASES)
def test_equals_trl(tmp_path, tokenizer, model_path, name):
    ours = make_trainer(
        tmp_path / "ours", model_path, prompt_dataset(), tokenizer, config_class=bitwise_config, **CASES[name]
    )
    ours.train()
    theirs = make_trainer(
        tmp_path / "theirs", model_path, prompt_dataset(), tokenizer, GRPOTrainer, GRPOConfig, **CASES[name]
    )
    theirs.train()
    assert log_without_timings(ours) == log_without_timings(theirs)
    assert_equal_weights(ours.model, theirs.model)
    assert any(entry.get("grad_norm", 0) > 0 and math.isfinite(entry["loss"]) for entry in ours.state.log_history)


def test_equals_trl_with_lora(tmp_path, tokenizer, model_path):
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.04}
    ours = make_trainer(
        tmp_path / "ours", model_path, prompt_dataset(), tokenizer, config_class=bitwise_config, **options
    )
    ours.train()
    theirs = make_trainer(
        tmp_path / "theirs", model_path, prompt_dataset(), tokenizer, GRPOTrainer, GRPOConfig, **options
    )
    theirs.train()
    assert log_without_timings(ours) == log_without_timings(theirs)
    assert_equal_weights(ours.model, theirs.model)


def test_takes_a_plain_trl_config(tmp_path, tokenizer, model_path):
    trainer = make_trainer(tmp_path, model_path, prompt_dataset(), tokenizer, config_class=GRPOConfig)
    trainer.train()
    assert trainer.supervision == "outcome"
    assert trainer.state.global_step == 2


def test_makes_its_own_config_like_trl(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = functools.partial(GRPOExtConfig, use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr("trl_grpo_ext.trainers.grpo_trainer.GRPOExtConfig", on_cpu)
    model.config._name_or_path = "someone/tiny"
    trainer = GRPOExtTrainer(model, length_reward, train_dataset=prompt_dataset(), processing_class=tokenizer)
    assert isinstance(trainer.args, GRPOExtConfig)
    assert trainer.args.output_dir == "tiny-GRPO"
