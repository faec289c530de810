"""
Run by two gloo processes: one of them lacks groups that teach something, and both refill alike.

A run that is resumed, with what was left over, ends as if it had never stopped.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import length_reward, make_trainer
from . import join, leave
from .two_processes import write_result


def equal_on_the_second_process_at_first(completion_ids, trainer_state, **kwargs):
    """On the second process all groups of the first batch of each step are equal, and half of the later ones."""
    calls = equal_on_the_second_process_at_first.calls
    calls.append(trainer_state.global_step)
    number = calls.count(trainer_state.global_step)
    rewards = length_reward(completion_ids)
    if PartialState().process_index == 0:
        return [reward + row % 4 for row, reward in enumerate(rewards)]
    return [(reward + row % 4) * (number > 1 and row // 4 % 2) for row, reward in enumerate(rewards)]


equal_on_the_second_process_at_first.calls = []


def build_trainer(folder: Path):
    equal_on_the_second_process_at_first.calls.clear()
    return make_trainer(
        folder / "output",
        str(folder / "model"),
        prompt_dataset(40),
        tiny_tokenizer(),
        reward_funcs=equal_on_the_second_process_at_first,
        dynamic_sampling=True,
        per_device_train_batch_size=16,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
    )


def main(folder: Path) -> None:
    join(folder)
    trainer = build_trainer(folder)
    seen = []
    sample_batch = trainer.sample_batch

    def record(inputs):
        batch = sample_batch(inputs)
        rows = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        live = batch["advantages"].view(-1, 4).abs().sum(1) > 0
        seen.append(
            {
                "prompts": [trainer.text_tokenizer.decode(ids[mask.bool()]) for ids, mask in rows],
                "live": live.tolist(),
                "tokens": int(batch["completion_mask"].sum()),
                "num_items": int(batch["num_items_in_batch"]),
            }
        )
        return batch

    trainer.sample_batch = record
    trainer.train()
    write_result(folder, trainer, seen)
    resumed = build_trainer(folder)
    resumed.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-2"))
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
