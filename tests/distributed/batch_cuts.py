"""
The gradient of 16 given completions of unequal length, for every way to cut them into micro-batches.

Run by two gloo processes to write the gradients of each case, and imported by the test for those of one process.
"""

import gc
import math
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import make_trainer, process_options
from . import join, leave


def outcome_rewards(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def rewards_of_every_other_group(prompts, completion_ids, **kwargs):
    """The groups of prompts 1 and 3 are all-same, with a float32 standard deviation that is not 0."""
    rewards = outcome_rewards(completion_ids)
    return [0.7 if int(p.split()[1].rstrip(":")) % 2 else r for p, r in zip(prompts, rewards, strict=True)]


CUTS = [(1, 1), (2, 2), (2, 4), (4, 2), (4, 4)]  # (gradient accumulation steps, steps per generation)
GROUPS, GROUP_SIZE = 4, 4
CASES = {
    **{
        f"{loss_type} {name}": {"loss_type": loss_type, **options}
        for loss_type in ("grpo", "dapo", "dr_grpo", "cispo", "sapo")
        for name, options in {
            "outcome": {},
            "process": {"supervision": "process", "kl_gradient": "naive"},
            "process, KL in the reward": {"supervision": "process", "kl_estimator": "k1", "kl_placement": "reward"},
        }.items()
    },
    "luspo outcome": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo outcome": {"loss_type": "vespo"},
    "dapo, nothing saved": {"loss_type": "dapo", "efficient_microbatches": False, "skip_zero_advantage": False},
    "grpo GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dapo GSPO-token": {"loss_type": "dapo", "importance_sampling_level": "sequence_token", "supervision": "process"},
    **{
        f"{loss_type} live groups": {
            "loss_type": loss_type,
            "live_group_denominator": True,
            "reward_funcs": rewards_of_every_other_group,
        }
        for loss_type in ("grpo", "dapo", "dr_grpo")
    },
    "dapo exact KL": {"loss_type": "dapo", "kl_estimator": "exact"},
    "dapo regrouped": {"loss_type": "dapo", "regroup_microbatches": True},
    "grpo process, regrouped": {"loss_type": "grpo", "supervision": "process", "regroup_microbatches": True},
}
TOKENIZER = tiny_tokenizer()
TEXT = "so we add one more and go on until all of it is done, then write what we have got"


def write_completions(prompts, trainer):
    """Completion i of a prompt, the same whatever batch the prompt is in: 2 to 30 tokens of a given text."""
    tokenizer = trainer.processing_class
    ids = tokenizer.encode(TEXT)
    seen: dict[str, int] = {}
    completions = []
    for prompt in prompts:
        member = seen[prompt] = seen.get(prompt, -1) + 1
        number = int(prompt.split()[1].rstrip(":"))
        length = 2 + (7 * number + 5 * member) % 29
        completions.append([*ids[number : number + length], tokenizer.eos_token_id])
    return {
        "prompt_ids": [tokenizer.encode(prompt) for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
    }


def step_rewards(steps, **kwargs):
    return [[float(len(text) * (index + 2) % 5) for index, text in enumerate(texts)] for texts in steps]


class GradientRecorder(TrainerCallback):
    """Mean over optimizer steps of the gradients before clipping; the weights never move."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))

    def mean(self):
        return torch.stack(self.gradients).mean(0)


def gradient(folder: Path, model_path: str, options: dict, cut: tuple[int, int]) -> torch.Tensor:
    accumulation, window = cut
    processes = PartialState().num_processes
    batch_size = GROUPS * GROUP_SIZE // max(cut) // processes
    process = options.get("supervision") == "process"
    recorder = GradientRecorder()
    trainer = make_trainer(
        folder,
        model_path,
        prompt_dataset(GROUPS),
        TOKENIZER,
        **{
            **(process_options(step_reward_funcs=step_rewards) if process else {}),
            "num_generations": GROUP_SIZE,
            "max_completion_length": 32,
            "beta": 0.3,
            "learning_rate": 0.0,
            "max_grad_norm": 0.0,
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": window,
            "max_steps": max(1, window // accumulation),
            "rollout_func": write_completions,
            "reward_funcs": outcome_rewards,
            "callbacks": [recorder],
            **options,
            "regroup_microbatches": options.get("regroup_microbatches", False) and math.gcd(*cut) > 1,
        },
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    trainer.train()
    return recorder.mean()


def main(folder: Path) -> None:
    state = join(folder)
    gradients = {
        (name, cut): gradient(folder / "output", str(folder / "model"), options, cut)
        for name, options in CASES.items()
        for cut in CUTS
    }
    if state.is_main_process:
        torch.save(gradients, folder / "gradients.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest.py
    main(Path(sys.argv[1]))
    leave()
