"""The private names of TRL that this package joins: if one moves, these tests say which."""

import inspect

import pytest
from trl import GRPOTrainer

from trl_grpo_ext.trainers import seams

from ..tiny import prompt_dataset
from .helpers import make_trainer


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_generate_and_score_completions", ["self", "inputs"]),
        (
            "_generate_single_turn",
            ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
        ),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_compute_loss", ["self", "model", "inputs"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_log_completion_extra", ["self", "column", "values"]),
        ("_log_metric", ["self", "name", "value"]),
    ],
)
def test_methods_of_trl_that_we_extend_or_call(method, parameters):
    assert hasattr(GRPOTrainer, method), (
        f"TRL no longer has GRPOTrainer.{method}; adapt trl_grpo_ext/trainers/seams.py"
    )
    found = list(inspect.signature(inspect.unwrap(getattr(GRPOTrainer, method))).parameters)
    assert found == parameters, f"TRL changed the parameters of GRPOTrainer.{method}; adapt trainers/seams.py"


def test_attributes_of_trl_that_we_read(tmp_path, model, tokenizer):
    trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer)
    for attribute in (
        "_buffered_inputs", "_step", "beta", "importance_sampling_level", "loss_type",
        "max_completion_length", "num_iterations", "temperature", "_logs", "_metrics", "_tokenizer", "_is_vlm",
        "num_generations", "num_generations_eval", "reward_weights", "scale_rewards",
    ):  # fmt: skip
        assert hasattr(trainer, attribute), f"TRL no longer has GRPOTrainer.{attribute}; adapt trainers/seams.py"


def test_trl_still_reads_what_we_change_after_the_forward_pass():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    forward = source.index("self._get_per_token_logps_and_entropies(")
    for read in ('inputs["advantages"]', 'inputs.get("old_per_token_logps")'):
        assert source.index(read) > forward, f"TRL reads {read} before the policy's forward pass; adapt before_loss"


def test_trl_still_calls_the_reference_last_when_it_generates():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    calls = [source.index(name) for name in ("ref_per_token_logps, _, _", "old_per_token_logps, _, _")]
    assert calls[0] > calls[1], "TRL computes the reference's log probabilities before the old ones; adapt seams.py"


def test_trl_still_trains_on_token_advantages():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "advantages.dim() == 1" in source, "TRL's loss may no longer take advantages of shape (B, T)"


def test_no_other_file_touches_private_names_of_trl():
    from pathlib import Path

    private = {"_calculate_rewards", "_generate_and_score_completions", "_buffered_inputs", "_metrics", "_logs"}
    package = Path(seams.__file__).parents[1]
    for file in package.rglob("*.py"):
        if file != Path(seams.__file__):
            assert not [name for name in private if f".{name}" in file.read_text()], file
