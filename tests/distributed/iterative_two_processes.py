"""
Iterative GRPO on given completions: run by two gloo processes, and imported by the test for one process.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState

from ..iterative.helpers import make_iterative_trainer, parity_labels
from ..tiny import prompt_dataset, save_tiny_model
from . import leave
from .batch_cuts import TOKENIZER, write_completions


def right_in_every_other_place(prompts, **kwargs):
    """Two of each group of four are right."""
    return [float(prompts[:index].count(prompt) % 2) for index, prompt in enumerate(prompts)]


CASES: dict[str, dict] = {
    "outcome": {"reward_update": "outcome"},
    "process": {"reward_update": "process", "trainer_options": {"step_verifier": parity_labels}},
    "ema, two rounds a batch": {"reference_update": "ema", "num_iterations": 2},
}


def train(folder: Path, case: str) -> dict[str, torch.Tensor]:
    """The weights of policy, reference and reward model after two iterations, and the rollouts."""
    processes = PartialState().num_processes
    options = dict(CASES[case])
    trainer_options = {
        "model": saved_model(folder),
        "rollout_func": write_completions,
        "verifier": right_in_every_other_place,
        "train_dataset": prompt_dataset(16),
        **options.pop("trainer_options", {}),
    }
    trainer = make_iterative_trainer(
        folder,
        TOKENIZER,
        num_rl_iterations=2,
        per_device_train_batch_size=16 // processes,
        max_completion_length=32,
        # The numbers of examples, without and with replay, are such that one process and two have whole batches
        reward_eval_share=0.0,
        replay_ratio=1 / 3,
        reward_model_batch_size=4 // processes,
        reward_model_epochs=2,
        trainer_options=trainer_options,
        **options,
    )
    trainer.train()
    assert trainer.accelerator.num_processes == processes
    models = {"policy": trainer.model, "reference": trainer.ref_model, "reward model": trainer.reward_model.model}
    if trainer.accelerator.is_main_process:
        rollouts = [asdict(rollout) for rollout in trainer.rollouts.load()]
        (folder / "rollouts.json").write_text(json.dumps(rollouts))
    return {
        f"{part} {name}": parameter.detach().clone()
        for part, model in models.items()
        for name, parameter in trainer.accelerator.unwrap_model(model).named_parameters()
    }


def saved_model(folder: Path) -> str:
    """A model that one process has written for all."""
    state = PartialState()
    if state.is_main_process:
        save_tiny_model(folder / "model")
    state.wait_for_everyone()
    return str(folder / "model")


def label(folder: Path) -> list[list[list[float]]]:
    """Labels by sampling, as each process has them after it trained a reward model on them."""
    trainer = make_iterative_trainer(
        folder, TOKENIZER, "process", num_rl_iterations=1, label_continuations=3, label_completions=5,
        per_device_train_batch_size=4, trainer_options={"model": saved_model(folder)},
    )  # fmt: skip
    trainer.train()
    return [rollout.step_labels for rollout in trainer.rollouts.load()]


def main(folder: Path) -> None:
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    weights = {case: train(folder / case, case) for case in CASES}
    torch.save(weights, folder / f"process_{state.process_index}.pt")
    (folder / f"labels_{state.process_index}.json").write_text(json.dumps(label(folder / "labels")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    leave()
