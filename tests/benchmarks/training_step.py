"""
Forward and backward pass of a training step, ours and TRL's alternately, on the same completions.

    python -m tests.benchmarks.training_step

For completion lengths of several distributions, and for prompts of several shares of all tokens (16 completions of
each, of log-normal lengths), it prints how much of the padded batch is tokens (fill), the median seconds of each side,
and the median, smallest and largest ratio of neighbouring measurements. The gradients are compared, too.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import generation_batch, length_reward, make_trainer


ROWS, LONGEST, REPEATS = 32, 384, 5
TOKENIZER = tiny_tokenizer()
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "equal": lambda rng: np.full(ROWS, LONGEST),
    "uniform": lambda rng: rng.integers(1, LONGEST + 1, ROWS),
    "log-normal": lambda rng: rng.lognormal(np.log(LONGEST / 4), 0.7, ROWS).clip(1, LONGEST).astype(int),
}


PROMPT_SHARES = {"prompt 10 %": 0.1, "prompt 50 %": 0.5, "prompt 80 %": 0.8}


def rollouts(name: str) -> Callable:
    lengths = DISTRIBUTIONS["log-normal" if name in PROMPT_SHARES else name](np.random.default_rng(0))
    lengths[0] = LONGEST
    share = PROMPT_SHARES.get(name, 0)
    prompt_length = round(share / (1 - share) * lengths.mean())

    def rollout_func(prompts, trainer):
        rng = np.random.default_rng(1)
        ids = [[*rng.integers(20, 250, length - 1).tolist(), TOKENIZER.eos_token_id] for length in lengths]
        fillers = {prompt: rng.integers(20, 250, prompt_length).tolist() for prompt in prompts}
        prompt_ids = [[*fillers[prompt], *TOKENIZER.encode(prompt)] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    return rollout_func


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=2048, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def step(trainer, batch) -> tuple[float, torch.Tensor]:
    """Seconds of a forward and backward pass, and the gradient."""
    trainer.model.zero_grad()
    start = time.perf_counter()
    trainer._compute_loss(trainer.model, batch).backward()
    seconds = time.perf_counter() - start
    return seconds, torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def compare(folder: Path, name: str) -> str:
    options = {
        "per_device_train_batch_size": ROWS, "num_generations": 16 if name in PROMPT_SHARES else 8,
        "max_completion_length": LONGEST, "rollout_func": rollouts(name), "reward_funcs": length_reward,
    }  # fmt: skip
    data = prompt_dataset()
    classes = ((GRPOTrainer, GRPOConfig), (GRPOExtTrainer, GRPOExtConfig))
    sides = [
        make_trainer(folder / "out", str(folder / "model"), data, TOKENIZER, *pair, **options) for pair in classes
    ]
    for trainer in sides:
        trainer.current_gradient_accumulation_steps = 1  # as a training loop would have set it
    batches = [generation_batch(trainer) for trainer in sides]
    mask = torch.cat([batches[0]["prompt_mask"], batches[0]["completion_mask"]], dim=1)
    gradients = [step(trainer, batch)[1] for trainer, batch in zip(sides, batches, strict=True)]  # warms up, too
    error = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
    times = [[step(trainer, batch)[0] for trainer, batch in zip(sides, batches, strict=True)] for _ in range(REPEATS)]
    ratios = [ours / theirs for theirs, ours in times]
    theirs, ours = (statistics.median(side) for side in zip(*times, strict=True))
    return (
        f"{name:<11} fill {mask.float().mean().item():4.0%}   TRL {theirs:6.3f} s   ours {ours:6.3f} s   ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})   gradient differs by {error:.0e}"
    )


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        for case in names or [*DISTRIBUTIONS, *PROMPT_SHARES]:
            print(compare(Path(name), case), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
