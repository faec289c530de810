"""
What process supervision costs besides the policy: advantages, steps scored by rule and by a PRM, and peak memory.

    python -m tests.benchmarks.overheads

Whole steps of the main job (the embedded policy samples, is scored and trained) are run by TRL, and by ours with
outcome supervision, process supervision by rule and a PRM of the policy's size, alternately in one process. A larger
PRM scores with prompts computed once, and for each completion. Peak memory is that of a process of its own for each
side.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, LlamaConfig, LlamaForTokenClassification
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer, ProcessRewardModel
from trl_grpo_ext.objective import process_advantages
from trl_grpo_ext.rewards import answer_reward
from trl_grpo_ext.tasks import EMBEDDED_JUDGE, EMBEDDED_POLICY, make_dataset, working_reward

from .memory import peak_bytes


ROWS, STEPS = 128, 6
PROCESS = {"supervision": "process"}


def seconds(function: Callable, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def print_advantages() -> None:
    for rows, length, group in ((1024, 1024, 8), (1024, 1024, 64), (2048, 1024, 8), (1024, 2048, 8)):
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(1, 17, (rows,), generator=generator).tolist()
        rewards = [torch.rand(count, generator=generator).tolist() for count in counts]
        ends = [sorted(torch.randperm(length, generator=generator)[:count].tolist()) for count in counts]
        took = seconds(partial(process_advantages, rewards, ends, group, length))
        print(f"advantages of B {rows:4}, T {length:4}, G {group:2}: {1e3 * took:5.1f} ms", flush=True)


def print_prompts_of_a_prm() -> None:
    """Scoring 8 completions of each of 8 prompts with prompts computed once, and for each completion, alternately."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_JUDGE)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=2, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=4,
    )  # fmt: skip
    prm = ProcessRewardModel(
        LlamaForTokenClassification(config), tokenizer=tokenizer, prm_format="token_classification"
    )
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return "".join(rng.choice(list("abcdefgh 12345"), length))

    for share in (0.1, 0.5, 0.8):
        prompts = [prompt for prompt in (text(round(100 * share / (1 - share))) for _ in range(8)) for _ in range(8)]
        steps = [[text(int(length)) for length in rng.lognormal(np.log(20), 0.7, 4)] for _ in prompts]
        times = []
        for _ in range(STEPS):
            both = []
            for can_share in (True, False):
                prm.can_share_prefixes = can_share
                both.append(seconds(partial(prm.score, prompts, steps), repeats=1))
            times.append(both)
        ratios = sorted(once / each for once, each in times[1:])
        print(
            f"PRM, prompts {share:.0%} of the tokens, computed once: {statistics.median(ratios):.2f} of the time for "
            f"each completion ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True,
        )  # fmt: skip


def make_trainer(side: str, folder: str):
    """A trainer of one of the sides, on the embedded task."""
    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if side == "TRL" else (GRPOExtTrainer, GRPOExtConfig)
    options: dict = {}
    if side == "process by rule":
        options = {"step_reward_funcs": working_reward}
    if side == "process by PRM":
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_JUDGE)
        judge = AutoModelForTokenClassification.from_pretrained(EMBEDDED_JUDGE)
        options = {
            "step_reward_funcs": ProcessRewardModel(judge, tokenizer=tokenizer, prm_format="token_classification")
        }
    args = config_class(
        output_dir=folder, per_device_train_batch_size=ROWS, num_generations=8, max_completion_length=64, beta=0.04,
        loss_type="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
        max_steps=STEPS + 1, **(PROCESS if options else {}),
    )  # fmt: skip
    return trainer_class(
        str(EMBEDDED_POLICY), answer_reward, args=args, train_dataset=make_dataset(400),
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED_POLICY, padding_side="left"), **options,
    )  # fmt: skip


def print_steps(folder: str) -> None:
    sides = ("TRL", "outcome", "process by rule", "process by PRM")
    trainers = {side: make_trainer(side, folder) for side in sides}
    spent = {side: record_scoring(trainer) for side, trainer in trainers.items() if side != "TRL"}
    batches = {side: iter(trainer.get_train_dataloader()) for side, trainer in trainers.items()}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for step in range(STEPS + 1):
        for side, trainer in trainers.items():
            torch.manual_seed(step)
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            inputs = next(batches[side])
            started = time.perf_counter()
            trainer.training_step(trainer.model, inputs, None)
            times[side].append(time.perf_counter() - started)
    for side in sides:
        ratios = sorted(ours / theirs for ours, theirs in zip(times[side][1:], times["TRL"][1:], strict=True))
        share = sum(spent[side][1:]) / sum(times[side][1:]) if side in spent else 0
        print(
            f"step, {side:<15} {statistics.median(times[side][1:]):.3f} s, {statistics.median(ratios):.2f} of TRL's "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}), scoring of steps and advantages {share:.1%} of it", flush=True,
        )  # fmt: skip


def record_scoring(trainer) -> list[float]:
    """The seconds that a trainer spends in each step on what outcome supervision by TRL does not have."""
    spent: list[float] = []
    before_rewards, batch_advantages = trainer.before_rewards, trainer.batch_advantages

    def timed_rewards(*args):
        started = time.perf_counter()
        before_rewards(*args)
        spent.append(time.perf_counter() - started)

    def timed_advantages(batch):
        started = time.perf_counter()
        advantages = batch_advantages(batch)
        spent[-1] += time.perf_counter() - started
        return advantages

    trainer.before_rewards, trainer.batch_advantages = timed_rewards, timed_advantages
    return spent


def prepare_training(side: str, folder: str) -> Callable:
    return make_trainer(side, folder).train


def print_memory(folder: str) -> None:
    peaks = {side: peak_bytes(prepare_training, side, folder) for side in ("TRL", "outcome", "process by rule")}
    for side, peak in peaks.items():
        print(f"peak memory of training, {side:<15} {peak / 2**20:4.0f} MiB, {peak / peaks['TRL']:.2f} of TRL's")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print_memory(folder)  # first: a new process starts with the peak of the one that it comes from
        print_advantages()
        print_prompts_of_a_prm()
        print_steps(folder)


if __name__ == "__main__":
    main()
