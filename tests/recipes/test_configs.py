"""Every YAML of recipes/ parses strictly with what is installed, says what it claims, and trains when scaled down."""

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from trl_grpo_ext.scripts import deepseekmath, iterative_grpo
from trl_grpo_ext.tasks import EMBEDDED_POLICY, make_dataset


RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted(path.stem for path in (RECIPES / "configs").glob("*.yaml"))
PAPER = {
    "num_generations": 64, "beta": 0.04, "loss_type": "grpo", "use_bias_correction_kl": False, "num_iterations": 1,
    "max_completion_length": 1024,
}  # fmt: skip
CLAIMED = {
    "deepseekmath_7b": {**PAPER, "learning_rate": 1e-6, "supervision": "outcome"},
    "iterative_7b": {
        **PAPER, "num_rl_iterations": 2, "replay_ratio": 0.1, "reference_update": "reset", "reward_update": "outcome",
        "reward_model_learning_rate": 2e-5, "shared_base": True,
    },
    "qlora_single_gpu": {"num_generations": 8},
    "small_model_single_gpu": {"supervision": "process", "step_credit": "min", "outcome_weight": 1.0},
    "small_model_vllm_colocate": {"use_vllm": True, "vllm_mode": "colocate", "supervision": "process"},
    "small_model_vllm_server": {"use_vllm": True, "vllm_mode": "server", "supervision": "process"},
    "smollm2_135m": {"supervision": "process"},
}  # fmt: skip
ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none", "--optim", "adamw_torch"]
SMALL = [
    *ON_CPU, "--max_steps", "1", "--logging_steps", "1", "--per_device_train_batch_size", "8", "--num_generations",
    "4", "--gradient_accumulation_steps", "1", "--max_completion_length", "24", "--num_eval_problems", "0",
    "--warmup_steps", "0", "--dtype", "float32",
]  # fmt: skip


def parse(name, *arguments):
    script = iterative_grpo if name.startswith("iterative") else deepseekmath
    path = RECIPES / "configs" / f"{name}.yaml"
    return script.make_parser().parse_args_and_config(["--config", str(path), *ON_CPU, *arguments])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_what_it_claims(tmp_path, name):
    script_args, training_args, model_args = parse(name, "--output_dir", str(tmp_path))
    assert set(script_args.reward_funcs) <= set(deepseekmath.REWARD_FUNCS)
    assert set(script_args.step_reward_funcs or []) <= set(deepseekmath.STEP_REWARD_FUNCS)
    for field, value in CLAIMED[name].items():
        assert getattr(training_args, field) == value, field
    if "qlora" in name or name == "iterative_7b":
        assert model_args.load_in_4bit
        assert model_args.use_peft
        assert model_args.bnb_4bit_quant_type == "nf4"


def test_the_papers_batch_is_1024_outputs_of_16_questions():
    config = yaml.safe_load((RECIPES / "configs" / "deepseekmath_7b.yaml").read_text())
    processes = yaml.safe_load((RECIPES / "accelerate_configs" / "zero3.yaml").read_text())["num_processes"]
    outputs = processes * config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert outputs == 1024
    assert outputs / config["num_generations"] == 16


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_the_vllm_variants_differ_by_vllm_alone(mode):
    plain, variant = (
        yaml.safe_load((RECIPES / "configs" / f"{name}.yaml").read_text())
        for name in ("small_model_single_gpu", f"small_model_vllm_{mode}")
    )
    assert {key for key in variant if "vllm" not in key} == set(plain)
    assert {key for key in plain if variant[key] != plain[key]} == {"output_dir"}


@pytest.fixture(scope="module")
def gsm8k_like(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"question": row["prompt"][0]["content"], "answer": f"{row['equations'][-1]}\n#### {row['solution']}"}
        for row in make_dataset(20)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("name", ["small_model_single_gpu", "qlora_single_gpu", "deepseekmath_7b"])
def test_a_config_trains_the_embedded_policy_on_cpu(tmp_path, gsm8k_like, name):
    """As it stands but for model, data, sizes and device: 4-bit weights, adapters, gradient checkpointing and all."""
    path = RECIPES / "configs" / f"{name}.yaml"
    deepseekmath.run(
        ["--config", str(path), *SMALL, "--model_name_or_path", str(EMBEDDED_POLICY), "--dataset_name",
         str(gsm8k_like), "--dataset_config", "default", "--output_dir", str(tmp_path / "output")]
    )  # fmt: skip
    file = "adapter_model.safetensors" if "qlora" in name else "model.safetensors"
    assert (tmp_path / "output" / file).exists()


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path):
    config = load_config_from_file(str(path))
    kinds = {"fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "single_gpu": "NO"}
    assert str(config.distributed_type).split(".")[-1] == kinds.get(path.stem, "MULTI_GPU")
    assert config.mixed_precision == "bf16"
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
