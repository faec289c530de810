"""
Forward and backward pass of a training step, ours and TRL's alternately, on the same completions.

    python -m tests.benchmarks.training_step [case ...]

For completion lengths of several distributions, for prompts of several shares of all tokens, for micro-batches, and
for growing numbers of completions a prompt (G), completion lengths (T) and numbers of completions (B), it prints how
much of the padded batch is tokens (fill), the median CPU seconds of each side, and the median, smallest and largest
ratio of neighbouring measurements. The gradients are compared, too, and for some cases peak memory.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import length_reward, make_trainer
from .memory import peak_bytes


REPEATS = 6
TOKENIZER = tiny_tokenizer()
SIDES = {"TRL": (GRPOTrainer, GRPOConfig), "ours": (GRPOExtTrainer, GRPOExtConfig)}
# Tokens (of SmolLM2's tokenizer) of the 1,000 published example solutions of GSM8K by a model of 175 B parameters with
# a verifier (github.com/openai/grade-school-math): smallest, deciles, largest. Questions have 62 on average.
GSM8K_DECILES = [2, 72, 86, 98, 112, 123, 136, 153, 171, 200, 371]
GSM8K_QUESTION = 62


@dataclass(frozen=True)
class Case:
    """Completions of a distribution of lengths, the longest of which is `longest`, as they are trained on at once."""

    lengths: str = "log-normal"
    prompt_share: float = 0.0
    num_rows: int = 32
    num_generations: int = 16
    longest: int = 384
    num_microbatches: int = 1
    regroups: bool = False

    def completion_lengths(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        if self.lengths == "GSM8K":
            places = (np.arange(self.num_rows) + 0.5) / self.num_rows
            return rng.permutation(np.interp(places, np.linspace(0, 1, 11), GSM8K_DECILES)).astype(int)
        lengths = {
            "equal": np.full(self.num_rows, self.longest),
            "uniform": rng.integers(1, self.longest + 1, self.num_rows),
            "log-normal": rng.lognormal(np.log(self.longest / 4), 0.7, self.num_rows).clip(1, self.longest),
        }[self.lengths].astype(int)
        lengths[0] = self.longest
        return lengths

    def prompt_length(self) -> int:
        if self.lengths == "GSM8K":
            return GSM8K_QUESTION
        return round(self.prompt_share / (1 - self.prompt_share) * self.completion_lengths().mean())


CASES = {
    "equal": Case("equal", num_generations=8),
    "uniform": Case("uniform", num_generations=8),
    "log-normal": Case(num_generations=8),
    "GSM8K": Case("GSM8K", num_generations=8),
    "micro-batches of 4": Case(num_generations=8, num_microbatches=8),
    "micro-batches of 4, regrouped": Case(num_generations=8, num_microbatches=8, regroups=True),
    "prompt 10 %": Case(prompt_share=0.1),
    "prompt 50 %": Case(prompt_share=0.5),
    "prompt 80 %": Case(prompt_share=0.8),
    "prompt 50 %, G 4": Case(prompt_share=0.5, num_generations=4),
    "prompt 50 %, G 32": Case(prompt_share=0.5, num_generations=32),
    "prompt 50 %, T 192": Case(prompt_share=0.5, longest=192),
    "prompt 50 %, T 768": Case(prompt_share=0.5, longest=768),
    "prompt 50 %, B 16": Case(prompt_share=0.5, num_rows=16),
    "prompt 50 %, B 64": Case(prompt_share=0.5, num_rows=64),
}
CASES_OF_MEMORY = ("equal", "log-normal", "GSM8K", "micro-batches of 4", "prompt 50 %")


def rollouts(case: Case, prompts: list[str], trainer) -> dict:
    rng = np.random.default_rng(1)
    lengths = case.completion_lengths()
    ids = [[*rng.integers(20, 250, length - 1).tolist(), TOKENIZER.eos_token_id] for length in lengths]
    fillers = {prompt: rng.integers(20, 250, case.prompt_length()).tolist() for prompt in prompts}
    prompt_ids = [[*fillers[prompt], *TOKENIZER.encode(prompt)] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=4096, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def prepare_step(folder: Path, name: str, side: str) -> Callable[[], tuple[float, torch.Tensor]]:
    """A function that makes the forward and backward passes, and returns their seconds and the gradient."""
    case = CASES[name]
    options = {"regroup_microbatches": True} if case.regroups and side == "ours" else {}
    trainer = make_trainer(
        folder / "out", str(folder / "model"), prompt_dataset(16), TOKENIZER, *SIDES[side],
        per_device_train_batch_size=case.num_rows // case.num_microbatches,
        gradient_accumulation_steps=case.num_microbatches, num_generations=case.num_generations,
        max_completion_length=case.longest, rollout_func=partial(rollouts, case), reward_funcs=length_reward,
        **options,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = case.num_microbatches  # as a training loop would have set it
    torch.manual_seed(0)  # of the order of the rows
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return partial(step, trainer, trainer._buffered_inputs)


def step(trainer, batches: list[dict]) -> tuple[float, torch.Tensor]:
    trainer.model.zero_grad()
    start = time.process_time()  # of one thread, whatever else the machine does
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()
    seconds = time.process_time() - start
    return seconds, torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def compare(folder: Path, name: str) -> str:
    steps = [prepare_step(folder, name, side) for side in SIDES]
    gradients = [step()[1] for step in steps]  # warms up, too
    error = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
    times: list[list[float]] = [[], []]
    for repeat in range(REPEATS):
        for side in (0, 1) if repeat % 2 else (1, 0):  # neither is always the first
            times[side].append(steps[side]()[0])
    ratios = [ours / theirs for theirs, ours in zip(*times, strict=True)]
    theirs, ours = map(statistics.median, times)
    case = CASES[name]
    lengths, prompt = case.completion_lengths(), case.prompt_length()
    fill = (prompt + lengths.mean()) / (prompt + lengths.max())
    return (
        f"{name:<30} fill {fill:4.0%}   TRL {theirs:6.3f} s   ours {ours:6.3f} s   ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})   gradient differs by {error:.0e}"
    )


def compare_memory(folder: Path, name: str) -> str:
    theirs, ours = (peak_bytes(prepare_step, folder, name, side) / 2**20 for side in SIDES)
    return f"{name:<30} peak memory   TRL {theirs:5.0f} MiB   ours {ours:5.0f} MiB   ratio {ours / theirs:.2f}"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        for case in names or CASES_OF_MEMORY:  # first, while this process is small
            print(compare_memory(folder, case), flush=True)
        for case in names or CASES:
            print(compare(folder, case), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
