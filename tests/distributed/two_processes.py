"""
Run by two gloo processes: completions of one group lie on both, with other numbers of steps on each.

Each process trains and writes what it saw; the test compares it with a computation on all of it in one process.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import make_trainer, process_options, step_length_reward
from . import join, leave


def cut_by_rank(text):
    """More steps on the second process, so that what is gathered is ragged."""
    width = 4 - 2 * PartialState().process_index
    return [text[start : start + width] for start in range(0, len(text), width)] or [""]


def main(folder: Path) -> None:
    join(folder)
    trainer = make_trainer(
        folder / "output",
        str(folder / "model"),
        prompt_dataset(),
        tiny_tokenizer(),
        # 12 completions in groups of 4: the second group lies on both processes
        **process_options(step_splitter=cut_by_rank, per_device_train_batch_size=6, max_steps=2),
    )
    seen = []
    generate_and_score = trainer._generate_and_score_completions

    def record(inputs):
        batch = generate_and_score(inputs)
        steps = [completion.texts for completion in trainer._steps]
        seen.append(
            {
                "prompts": [row["prompt"] for row in inputs],
                "step_rewards": step_length_reward(steps),
                "step_ends": [completion.ends for completion in trainer._steps],
                "advantages": batch["advantages"].tolist(),
            }
        )
        return batch

    trainer._generate_and_score_completions = record
    trainer.train()
    write_result(folder, trainer, seen)


def write_result(folder: Path, trainer, batches: list[dict]) -> None:
    """What a process has seen and ends with, for the test to compare."""
    checksum = sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters())
    result = {"batches": batches, "checksum": checksum, "log": trainer.state.log_history}
    (folder / f"process_{PartialState().process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    leave()
