"""
The main recipe with a process reward model, for four steps: run by two gloo processes, by the test in one.

The first three steps train on completions that are a function of the prompt, so that one process and two see the same.
The last one samples, which a resume has to do as if there had been no kill.
"""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from trl_grpo_ext.scripts import deepseekmath

from ..prm.test_process_reward_model import tiny_prm
from ..tiny import tiny_tokenizer


GIVEN_STEPS = 3
GLOBAL_BATCH = 24  # three groups of 8, of which the second lies on both processes


def save_prm(folder: Path) -> None:
    """A process reward model with a tokenizer of its own, which is not the policy's."""
    tokenizer = tiny_tokenizer()
    tiny_prm(tokenizer, architectures=["LlamaForTokenClassification"]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_completions(prompts, trainer):
    tokenizer = trainer.text_tokenizer
    prompt_ids = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts
    ]
    if trainer.mode == "train" and trainer.state.global_step >= GIVEN_STEPS:
        completion_ids = trainer.sample_continuations(prompt_ids)
    else:
        completion_ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in given_texts(prompts, trainer)]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def given_texts(prompts, trainer) -> list[str]:
    """Completion i of a prompt in the whole batch, the same on whatever process it lies."""
    everyones = [json.dumps(prompt) for prompt in gather_object(prompts)]
    start = trainer.accelerator.process_index * len(prompts)
    return [
        working(random.Random(f"{everyones[row]} {everyones[:row].count(everyones[row])}"))
        for row in range(start, start + len(prompts))
    ]


def working(rng: random.Random) -> str:
    """One to three sums and an answer."""
    numbers = [rng.randint(1, 40) for _ in range(rng.randint(2, 4))]
    lines = [f"{a} + {b} = {a + b}" for a, b in pairwise(numbers)]
    return "\n".join([*lines, f"The answer is \\boxed{{{sum(numbers)}}}."])


def train(folder: Path, name: str, *arguments: str) -> None:
    processes = PartialState().num_processes
    options = [
        "--step_reward_funcs", str(folder / "prm"), "--beta", "0.04", "--max_steps", str(GIVEN_STEPS + 1),
        "--per_device_train_batch_size", str(GLOBAL_BATCH // processes), "--logging_steps", "1",
        "--save_steps", str(GIVEN_STEPS), "--save_total_limit", "2", "--num_train_problems", "40",
        "--num_eval_problems", "8", "--per_device_eval_batch_size", str(8 // processes), "--num_eval_samples", "2",
        "--eval_steps", str(GIVEN_STEPS), "--use_cpu", "true", "--cpu_threads", "1",
        "--output_dir", str(folder / name), *arguments,
    ]  # fmt: skip
    argv = deepseekmath.with_default_config(options, deepseekmath.DEFAULT_CONFIG)
    deepseekmath.main(*deepseekmath.make_parser().parse_args_and_config(argv), rollout_func=write_completions)


if __name__ == "__main__":
    # One job a launch: it leaves the process group, which cannot be joined again
    torch.set_num_threads(1)
    assert PartialState(cpu=True).num_processes == 2
    train(Path(sys.argv[1]), *sys.argv[2:])
