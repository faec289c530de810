"""
Run by two gloo processes: each case is trained with and without what saves work, and compared by each process.

Each process has one group, and one of the two groups no advantage, so that the processes need other numbers of
forward passes. Prompts are long, so that they are computed once.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig

from trl_grpo_ext import batching

from ..tiny import tiny_tokenizer
from ..trainers.helpers import bitwise_config
from ..trainers.test_efficient_forward import (
    LONG_PROMPTS,
    LOSS_TYPES,
    OPTIONS,
    assert_equal_training,
    train,
    with_tool_results,
)
from . import join, leave


CASES = {
    **OPTIONS,
    "buffers that are broadcast": {"ddp_broadcast_buffers": True},
    "a static graph": {"ddp_static_graph": True},
    "parameters that may go unused": {"ddp_find_unused_parameters": True},
    **{
        f"{loss_type}, tool and truncation masks, LoRA": {
            "loss_type": loss_type,
            "importance_sampling_level": "sequence" if loss_type == "luspo" else "token",
            "rollout_func": with_tool_results,
            "mask_truncated_completions": True,
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        }
        for loss_type in LOSS_TYPES
    },
}


def compare(folder: Path, options: dict) -> dict:
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "train_dataset": LONG_PROMPTS, **options}
    sides = [
        train(folder / "output", tiny_tokenizer(), str(folder / "model"), **options, **side)
        for side in ({}, {"config_class": bitwise_config})
    ]
    try:
        assert_equal_training(*sides)
        difference = None
    except AssertionError as error:
        difference = str(error)
    return {
        "difference": difference,
        "shares_prompts": sides[0].can_share_prompts,
        "share_without_advantage": sides[0].state.log_history[0]["frac_reward_zero_std"],
    }


def main(folder: Path) -> None:
    state = join(folder)
    batching.PASS_TOKENS = 0  # the models are so small that no further pass would pay
    results = {name: compare(folder, options) for name, options in CASES.items()}
    (folder / f"process_{state.process_index}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    leave()
