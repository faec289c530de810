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
        "_buffered_inputs", "_logs", "_metrics", "_tokenizer", "num_generations", "num_generations_eval",
        "reward_weights", "scale_rewards",
    ):  # fmt: skip
        assert hasattr(trainer, attribute), f"TRL no longer has GRPOTrainer.{attribute}; adapt trainers/seams.py"


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
