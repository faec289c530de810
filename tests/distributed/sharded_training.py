"""
Two gloo processes train models that each of them holds whole, or sharded by ZeRO-2, ZeRO-3 or FSDP2.

Which of them, the environment says, as `accelerate launch` sets it from a recipe's file. Each process writes what it
has; the test compares it with what whole models have.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from trl_grpo_ext.iterative.reference import whole_tensor
from trl_grpo_ext.scripts import deepseekmath

from ..iterative.helpers import make_iterative_trainer, tiny_process_model
from ..tiny import prompt_dataset, save_tiny_model
from ..trainers.helpers import make_trainer, process_options
from .batch_cuts import TOKENIZER, write_completions


FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"
ZERO_STAGE = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0"))
LARGE = 100_000  # elements of the smallest tensor that ZeRO-3 shards
HIDDEN_SIZE = 352
CONFIGURED = {"use_configured_state": True}
CASES: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 3e-5},
    "lora": {"learning_rate": 1e-3, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
}


def start() -> PartialState:
    """The state that a trainer takes over; DeepSpeed's configuration in it is of one trainer alone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    state = PartialState(cpu=True)
    if FSDP:
        # Accelerate has FSDP leave models whole where the state is called MULTI_CPU; it asks for no more than the name
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return state


def assert_sharded(model: torch.nn.Module) -> None:
    """A device has half of every large parameter, with ZeRO-3 and FSDP2."""
    sizes = [(getattr(p, "ds_numel", p.numel()), local_size(p)) for p in model.parameters()]
    large = [(size, local) for size, local in sizes if size > LARGE]
    assert large
    share = 2 if FSDP or ZERO_STAGE == 3 else 1
    assert all(local * share == size for size, local in large)


def local_size(parameter: torch.nn.Parameter) -> int:
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel() if parameter.numel() == 0 else parameter.numel()
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}


def iterative_trainer(folder: Path, case: str):
    start()
    options = dict(CASES[case])
    return make_iterative_trainer(
        folder,
        TOKENIZER,
        "none",
        num_rl_iterations=2,
        learning_rate=options.pop("learning_rate"),
        supervision="process",
        per_device_train_batch_size=8,
        max_completion_length=32,
        save_strategy="steps",
        save_steps=3,
        trainer_options={
            "model": str(folder.parent / "model"),
            "reward_model": str(folder.parent / "prm"),
            "rollout_func": write_completions,
            "train_dataset": prompt_dataset(16),
            **options,
        },
        accelerator_config=CONFIGURED,
    )


def reference_gap(trainer) -> float:
    """The largest difference of a weight of the reference from the policy's."""
    weights = whole(trainer.accelerator.unwrap_model(trainer.model))
    if trainer.ref_model is not None:
        reference = whole(trainer.accelerator.unwrap_model(trainer.ref_model))
    else:
        reference = {n.replace(".ref.", ".default."): value for n, value in weights.items() if ".ref." in n}
    return max((weights[name] - value).abs().max().item() for name, value in reference.items())


def record_gaps(trainer) -> list[tuple[float, float]]:
    """How far the reference is from the policy before and after each of its updates."""
    gaps = []
    move = trainer._move_reference

    def moved(share):
        before = reference_gap(trainer)
        move(share)
        gaps.append((before, reference_gap(trainer)))

    trainer._move_reference = moved
    return gaps


def train_iteratively(folder: Path, case: str) -> dict[str, Any]:
    """What a run starts and ends with, and what one ends with that is resumed in the midst of an iteration."""
    trainer = iterative_trainer(folder, case)
    gaps = record_gaps(trainer)
    start_weights = whole(trainer.accelerator.unwrap_model(trainer.model))
    trainer.train()
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            assert_sharded(model)
    trainer.save_model(str(folder / "saved"))
    resumed = iterative_trainer(folder, case)
    resumed.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-3"))
    return {
        "start": start_weights,
        "weights": whole(trainer.accelerator.unwrap_model(trainer.model)),
        "resumed": whole(resumed.accelerator.unwrap_model(resumed.model)),
        "gaps": gaps,
        "log": trainer.state.log_history,
    }


def sample_and_train(folder: Path) -> list[dict[str, float]]:
    """The log of process supervision with a KL, on completions that the model samples, of other lengths on each."""
    start()
    trainer = make_trainer(
        folder / "sampled",
        str(folder / "model"),
        prompt_dataset(),
        TOKENIZER,
        **process_options(
            per_device_train_batch_size=4, max_completion_length=64, max_steps=3, beta=0.1, learning_rate=3e-5,
            accelerator_config=CONFIGURED,
        ),
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history


def run_recipe(folder: Path) -> None:
    """Evaluation included, before the model is sharded and after, of one problem more on one process."""
    start()
    deepseekmath.run(
        ["--max_steps", "1", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "3",
         "--num_eval_problems", "3", "--num_eval_samples", "2", "--num_train_problems", "40",
         "--max_completion_length", "32", "--use_cpu", "true", "--output_dir", str(folder / "recipe"),
         "--accelerator_config", json.dumps(CONFIGURED)]
    )  # fmt: skip


def main(folder: Path) -> None:
    state = start()
    assert state.num_processes == 2
    if state.is_main_process:
        save_tiny_model(folder / "model", hidden_size=HIDDEN_SIZE)
        tiny_process_model(TOKENIZER).model.save_pretrained(folder / "prm")
        TOKENIZER.save_pretrained(folder / "prm")
        for case in CASES:
            (folder / case).mkdir()
    state.wait_for_everyone()
    results: dict[str, Any] = {case: train_iteratively(folder / case, case) for case in CASES}
    results["sampled"] = sample_and_train(folder)
    torch.save(results, folder / f"process_{state.process_index}.pt")
    run_recipe(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
