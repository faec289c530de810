"""Every objective of recipes/configs/objectives parses strictly, fixes what its paper fixes, and trains."""

from pathlib import Path

import pytest

from trl_grpo_ext.scripts import deepseekmath


FOLDER = Path(__file__).parents[2] / "recipes" / "configs" / "objectives"
OBJECTIVES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
SMALL = [
    *ON_CPU, "--max_steps", "1", "--logging_steps", "1", "--per_device_train_batch_size", "8",
    "--num_generations", "4", "--gradient_accumulation_steps", "1", "--steps_per_generation", "1",
    "--max_completion_length", "24",
    "--num_train_problems", "20", "--num_eval_problems", "0", "--gradient_checkpointing", "false",
]  # fmt: skip
FIXED = {
    "deepseekmath_outcome": {
        "supervision": "outcome", "loss_type": "grpo", "beta": 0.04, "resolved_kl_gradient": "naive",
        "std_correction": 0, "num_generations": 64, "learning_rate": 1e-6, "generation_batch_size": 1024,
        "max_completion_length": 1024,
    },
    "deepseekmath_process": {
        "supervision": "process", "step_credit": "sum_to_go", "loss_type": "grpo", "beta": 0.04,
        "resolved_kl_gradient": "naive", "std_correction": 0, "generation_batch_size": 1024,
    },
    "online_rft": {"advantage_baseline": "none", "scale_rewards": "none", "beta": 0.0, "loss_type": "grpo"},
    "dapo": {
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "scale_rewards": "group",
        "dynamic_sampling": True, "max_completion_length": 20480,
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch", "advantage_baseline": "mean"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 1.0]},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
    "rloo": {"advantage_baseline": "leave_one_out", "scale_rewards": "none", "kl_placement": "reward", "beta": 0.03},
    "reinforce_plus_plus": {"advantage_baseline": "batch", "scale_rewards": "batch", "kl_estimator": "k1"},
    "deepseek_r1": {"beta": 0.001, "epsilon": 10.0, "generation_batch_size": 8192, "ref_model_sync_steps": 400},
}  # fmt: skip


def parse(name, *arguments):
    return deepseekmath.make_parser().parse_args_and_config(
        ["--config", str(FOLDER / f"{name}.yaml"), *ON_CPU, *arguments]
    )


def test_each_has_its_numbers_listed_here():
    assert sorted(FIXED) == OBJECTIVES


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fixes_what_its_paper_fixes(tmp_path, name):
    _, training_args, _ = parse(name, "--output_dir", str(tmp_path))
    for field, value in FIXED[name].items():
        assert getattr(training_args, field) == value, field


@pytest.mark.parametrize("name", OBJECTIVES)
def test_names_its_source(name):
    header = (FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    assert "arXiv:" in header or "doi:" in header


@pytest.mark.parametrize("name", OBJECTIVES)
def test_trains_the_embedded_policy(tmp_path, name):
    process = ["--step_reward_funcs", "working_reward"] if name == "deepseekmath_process" else []
    # An update of the reference after each step instead of after 400
    is_synced = "sync_ref_model" in (FOLDER / f"{name}.yaml").read_text()
    sync = ["--ref_model_sync_steps", "1"] if is_synced else []
    deepseekmath.run(
        ["--config", str(FOLDER / f"{name}.yaml"), *SMALL, *process, *sync, "--output_dir", str(tmp_path / "output")]
    )
    assert (tmp_path / "output" / "model.safetensors").exists()
