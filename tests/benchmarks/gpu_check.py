"""
Some training steps on a GPU, ours and TRL's alternately: seconds a step, peak memory, and their ratios.

    python -m tests.benchmarks.gpu_check

A model of 0.5 B parameters (Qwen2.5's shape, random weights) is trained in bf16 with KL, fully and by QLoRA, on given
completions of log-normal lengths, so that all sides train on the same and none is timed on sampling. Where there is no
GPU a tiny model takes its place, which shows that the script works and measures nothing.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import cut_every_four, length_reward, step_length_reward


ON_GPU = torch.cuda.is_available()
ROWS, LONGEST, STEPS = (32, 512, 4) if ON_GPU else (8, 24, 2)
SIDES = {"TRL": (GRPOTrainer, GRPOConfig, {}), "ours": (GRPOExtTrainer, GRPOExtConfig, {})}
SIDES["ours, process"] = (GRPOExtTrainer, GRPOExtConfig, {"supervision": "process"})


def save_model(folder: Path) -> None:
    """A model of Qwen2.5-0.5B's shape, but for its vocabulary's words."""
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    if not ON_GPU:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=151_936 if ON_GPU else len(tokenizer), num_key_value_heads=2, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def log_normal_completions(prompts, trainer):
    """Completions of log-normal lengths, the same on all sides, instead of what a random model would write."""
    tokenizer = trainer.processing_class
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    lengths = (
        torch.empty(len(prompts)).log_normal_(generator=generator).mul(LONGEST / 4).clamp(2, LONGEST).int().tolist()
    )
    ids = [
        [*torch.randint(20, 250, (length - 1,), generator=generator).tolist(), tokenizer.eos_token_id]
        for length in lengths
    ]
    return {"prompt_ids": [tokenizer.encode(prompt) for prompt in prompts], "completion_ids": ids, "logprobs": None}


def train(side: str, model: str, folder: Path, is_qlora: bool) -> tuple[float, float]:
    """Median seconds of a step after the first, and peak memory in GiB."""
    trainer_class, config_class, options = SIDES[side]
    args = config_class(
        output_dir=str(folder), per_device_train_batch_size=ROWS, num_generations=8, max_completion_length=LONGEST,
        max_steps=STEPS + 1, beta=0.04, loss_type="dapo", bf16=ON_GPU, use_cpu=not ON_GPU,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        **options,
    )  # fmt: skip
    extra = (
        {"quantization_config": nf4(), "peft_config": LoraConfig(r=16, target_modules="all-linear")}
        if is_qlora
        else {}
    )
    if options:
        extra |= {"step_reward_funcs": step_length_reward, "step_splitter": cut_every_four}
    trainer = trainer_class(
        model, length_reward, args=args, train_dataset=prompt_dataset(64), rollout_func=log_normal_completions, **extra
    )
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry][1:]
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else float("nan")
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(seconds), peak


def nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16 if ON_GPU else torch.float32,
    )


def main(repeats: int) -> None:
    started = time.perf_counter()
    device = torch.cuda.get_device_name() if ON_GPU else "no GPU: a tiny model on the CPU, which measures nothing"
    table = Table(title=f"{device}; {ROWS} completions of up to {LONGEST} tokens a step")
    for column in ("", "seconds a step", "of TRL's", "peak GiB", "of TRL's"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder, "model"))
        for is_qlora in (False, True):
            runs: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
            for _ in range(repeats):
                for side, results in runs.items():
                    results.append(train(side, f"{folder}/model", Path(folder, "output"), is_qlora))
            theirs = [statistics.median(values) for values in zip(*runs["TRL"], strict=True)]
            for side, results in runs.items():
                seconds, peak = (statistics.median(values) for values in zip(*results, strict=True))
                name = f"{side}, {'QLoRA' if is_qlora else 'full'}"
                table.add_row(
                    name, f"{seconds:.3f}", f"{seconds / theirs[0]:.2f}", f"{peak:.2f}", f"{peak / theirs[1]:.2f}"
                )
    Console().print(table)
    Console().print(f"Took {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    main(parser.parse_args().repeats)
