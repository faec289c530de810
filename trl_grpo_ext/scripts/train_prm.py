r"""
Train a process reward model on labelled steps, and say how good it is on held-out ones.

Without arguments it trains one from the embedded judge on solutions of the embedded word problems, labelled by rule,
in about a minute on two CPU cores:

    python -m trl_grpo_ext.scripts.train_prm

With `--dataset_name step-labels` it takes what `label_steps.py` wrote.
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, set_seed
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from ..choices import check_at_least_one
from ..data import get_split, load_prompt_dataset
from ..tasks import EMBEDDED_JUDGE, working_reward
from ..tasks.word_problems import imperfect_solution, sample_problems, word_problem
from ..trainers.prm_config import PRMConfig
from ..trainers.prm_trainer import PRMTrainer


DEFAULTS = [
    "--output_dir", "prm-embedded", "--learning_rate", "5e-5", "--head_learning_rate", "5e-3",
    "--per_device_train_batch_size", "32",
    "--per_device_eval_batch_size", "256", "--num_train_epochs", "1", "--lr_scheduler_type", "cosine",
    "--warmup_steps", "10", "--save_strategy", "no", "--report_to", "none", "--logging_steps", "50",
    "--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--dataloader_pin_memory", "false",
]  # fmt: skip
METRICS = ("accuracy", "base_rate", "first_error_f1", "calibration_error")


@dataclass
class TrainPRMArguments:
    """
    Arguments of the training besides the trainer's and the model's.

    Args:
        dataset_name (`str`, *optional*):
            Data set with `prompt`, `completions` and `labels`: a Hub id or a local folder. By default solutions of the
            embedded word problems, labelled by rule.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_share (`float`, *optional*, defaults to `0.1`):
            Share of the questions that is held out.
        num_train_problems (`int`, *optional*, defaults to `6000`):
            Number of problems to make for the embedded task.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set with `prompt`, `completions` and `labels`."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_share: float = field(default=0.1, metadata={"help": "Share of the questions that is held out."})
    num_train_problems: int = field(
        default=6_000, metadata={"help": "Number of problems to make for the embedded task."}
    )

    def __post_init__(self):
        if not 0 < self.eval_share < 1:
            raise ValueError(f"`eval_share` is {self.eval_share}, but must be between 0 and 1.")
        check_at_least_one(num_train_problems=self.num_train_problems)


def tutored_steps(num_problems: int, held_out: bool, seed: int) -> Dataset:
    """A careless tutor's solutions, each line labelled by whether the answer can still come out right after it."""
    rng = random.Random(seed)
    rows = []
    for problem in sample_problems(num_problems, held_out=held_out, seed=seed):
        lines = imperfect_solution(problem, rng, slip_rate=0.2).split("\n")
        labels = working_reward([lines], [problem.equations], [str(problem.totals[-1])])[0]
        prompt = [{"role": "user", "content": word_problem(problem, rng)}]
        rows.append({"prompt": prompt, "completions": lines, "labels": labels})
    return Dataset.from_list(rows)


def load_splits(script_args: TrainPRMArguments, seed: int) -> tuple[Dataset, Dataset]:
    """Rows to train on and held-out ones, which share no question."""
    if script_args.dataset_name is None:
        num_eval = max(1, int(script_args.num_train_problems * script_args.eval_share))
        return (
            tutored_steps(script_args.num_train_problems, held_out=False, seed=seed),
            tutored_steps(num_eval, held_out=True, seed=seed),
        )
    splits = load_prompt_dataset(script_args.dataset_name)
    dataset = get_split(splits, script_args.dataset_train_split, "dataset_train_split")
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"`dataset_name` is {script_args.dataset_name!r}, which has no column 'prompt'; give rows of `prompt`, "
            "`completions` (the steps) and `labels`."
        )
    questions = [json.dumps(prompt) for prompt in dataset["prompt"]]
    distinct = sorted(set(questions))
    random.Random(seed).shuffle(distinct)
    held_out = set(distinct[: max(1, int(len(distinct) * script_args.eval_share))])
    is_held_out = [question in held_out for question in questions]
    return (
        dataset.select([index for index, held in enumerate(is_held_out) if not held]),
        dataset.select([index for index, held in enumerate(is_held_out) if held]),
    )


def main(script_args: TrainPRMArguments, training_args: PRMConfig, model_args: ModelConfig) -> None:
    set_seed(training_args.seed)  # of a new head, too
    name = model_args.model_name_or_path or str(EMBEDDED_JUDGE)
    train_dataset, eval_dataset = load_splits(script_args, training_args.seed)
    trainer = PRMTrainer(
        model=name,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_locally()
    after = trainer.evaluate()
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        results = {"before": without_nan(before), "after": without_nan(after)}
        Path(training_args.output_dir, "results.json").write_text(json.dumps(results, indent=2) + "\n")
        Console().print(results_table(before, after, len(eval_dataset)))
    if training_args.push_to_hub:
        trainer.push_to_hub()


def without_nan(metrics: dict[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: one that could not be computed is null."""
    return {name: None if value != value else value for name, value in metrics.items()}


def results_table(before: dict[str, float], after: dict[str, float], num_rows: int) -> Table:
    table = Table(title=f"Steps of {num_rows} held-out solutions (%)")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right")
    for metric in METRICS:
        table.add_row(metric, *(f"{100 * values[f'eval_{metric}']:.1f}" for values in (before, after)))
    return table


def make_parser() -> TrlParser:
    return TrlParser((TrainPRMArguments, PRMConfig, ModelConfig))


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    arguments = sys.argv[1:] if argv is None else argv
    chosen = ("--config", "--model_name_or_path")
    is_default = not any(argument.split("=")[0] in chosen for argument in arguments)
    main(*make_parser().parse_args_and_config([*DEFAULTS, *arguments] if is_default else arguments))


if __name__ == "__main__":
    run()
