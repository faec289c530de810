r"""
DeepSeekMath's GRPO with process supervision (arXiv:2402.03300, 4.1): train, evaluate before and after, report.

Without arguments it trains the embedded policy on the embedded word problems, in minutes on two CPU cores:

    accelerate launch -m trl_grpo_ext.scripts.deepseekmath

With a model, a data set and a YAML file it is the recipe for a real one:

    accelerate launch -m trl_grpo_ext.scripts.deepseekmath \
        --config my_config.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name openai/gsm8k --dataset_config main
"""

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.models import unwrap_model_for_generation
from trl.rewards import get_cosine_scaled_reward, get_soft_overlong_punishment, think_format_reward

from ..callbacks import PANELS, CompactProgressCallback, Panels, plot_training
from ..data import (
    check_reward_columns,
    get_split,
    load_prompt_dataset,
    to_prompts_and_solutions,
    warn_of_unparsed_solutions,
    without_problems_of,
)
from ..evaluation import confidence_interval, evaluate_policy
from ..generation import load_tokenizer
from ..prm import ProcessRewardModel
from ..rewards import answer_reward, arithmetic_reward, format_reward
from ..rewards.length import get_step_overlong_punishment
from ..tasks import EMBEDDED_POLICY, make_dataset, make_sums_dataset, working_reward
from ..trainers.grpo_config import GRPOExtConfig
from ..trainers.grpo_trainer import GRPOExtTrainer
from ..trainers.seams import last_complete_checkpoint


DEFAULT_CONFIG = Path(__file__).with_name("embedded.yaml")
REWARD_FUNCS: dict[str, Callable] = {
    "answer_reward": answer_reward,
    "format_reward": format_reward,
    "think_format_reward": think_format_reward,
}
TASKS: dict[str, Callable[..., Dataset]] = {"word_problems": make_dataset, "sums": make_sums_dataset}
STEP_REWARD_FUNCS: dict[str, Callable] = {"working_reward": working_reward, "arithmetic_reward": arithmetic_reward}


@dataclass
class DeepSeekMathArguments:
    """
    Arguments of the job besides the trainer's and the model's.

    Args:
        dataset_name (`str`, *optional*):
            Data set to train on: a Hub id, or a local folder or file (JSONL, JSON, parquet, CSV). Without it an
            embedded task is trained on.
        dataset_config (`str`, *optional*):
            Configuration of a Hub data set.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        dataset_test_split (`str`, *optional*, defaults to `"test"`):
            Split to evaluate on.
        task (`str`, *optional*, defaults to `"word_problems"`):
            Embedded task to train on where no `dataset_name` is given: `"word_problems"` or `"sums"`.
        reward_funcs (`list[str]`, *optional*, defaults to `["answer_reward"]`):
            Reward functions: `"answer_reward"`, `"format_reward"` (one closed box), `"think_format_reward"`,
            `"soft_overlong_punishment"` (DAPO, arXiv:2503.14476, Eq. 13), `"cosine_scaled_reward"` (the answer, better
            the shorter it is right: arXiv:2502.03373, C.1), or dotted import paths.
        soft_punish_cache (`int`, *optional*):
            Length of the interval, in tokens before `max_completion_length`, over which the overlong punishments
            grow from 0 to -1. By default a fifth of `max_completion_length`, as in DAPO.
        step_reward_funcs (`list[str]`, *optional*):
            Step rewards of process supervision: `"working_reward"` (embedded tasks only), `"arithmetic_reward"`,
            `"step_overlong_punishment"` (what each step adds to the soft overlong punishment), dotted import paths of
            functions, or process reward models (folders, or Hub ids with a slash). With `supervision="outcome"` they
            are used by `process_filter_keep` only.
        instruction (`str`, *optional*):
            Text to put after each question of a plain-text data set.
        num_train_problems (`int`, *optional*, defaults to `4000`):
            Number of problems to make for an embedded task.
        num_eval_problems (`int`, *optional*, defaults to `256`):
            Number of held-out problems to evaluate on before, during and after, `0` to leave it out.
        num_eval_samples (`int`, *optional*, defaults to `8`):
            Samples a problem, the K of Maj@K and Pass@K.
        cpu_threads (`int`, *optional*):
            Threads of each process for training on CPU, `0` for an even share of the cores. Left out, it is what the
            launcher set; `accelerate launch` sets one.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set to train on: a Hub id, or a local folder or file."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    task: str = field(
        default="word_problems",
        metadata={"help": "Embedded task to train on where no `dataset_name` is given.", "choices": list(TASKS)},
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["answer_reward"],
        metadata={
            "help": "Reward functions: 'answer_reward', 'format_reward', 'think_format_reward', "
            "'soft_overlong_punishment', 'cosine_scaled_reward', or dotted import paths."
        },
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={"help": "Tokens before `max_completion_length` over which the overlong punishments grow."},
    )
    step_reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Step rewards: 'working_reward' (embedded tasks only), 'arithmetic_reward', "
            "'step_overlong_punishment', dotted import paths of functions, or process reward models (folders or Hub "
            "ids)."
        },
    )
    instruction: str | None = field(
        default=None, metadata={"help": "Text to put after each question of a plain-text data set."}
    )
    num_train_problems: int = field(
        default=4000, metadata={"help": "Number of problems to make for an embedded task."}
    )
    num_eval_problems: int = field(
        default=256, metadata={"help": "Number of held-out problems to evaluate on, 0 to leave it out."}
    )
    num_eval_samples: int = field(default=8, metadata={"help": "Samples a problem, the K of Maj@K and Pass@K."})
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "Threads of each process for training on CPU, 0 for an even share of the cores."},
    )

    def __post_init__(self):
        smallest = {
            "soft_punish_cache": 0,
            "num_train_problems": 1,
            "num_eval_problems": 0,
            "num_eval_samples": 1,
            "cpu_threads": 0,
        }
        for name, bound in smallest.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"`{name}` is {value}, but must be {bound} or more.")


def make_parser(subparsers: argparse._SubParsersAction | None = None, prog: str | None = None) -> TrlParser:
    dataclass_types = (DeepSeekMathArguments, GRPOExtConfig, ModelConfig)
    if subparsers is not None:
        return subparsers.add_parser(
            "deepseekmath", help="GRPO as in DeepSeekMath, with process supervision", dataclass_types=dataclass_types
        )
    return TrlParser(dataclass_types, prog=prog)


def with_default_config(argv: list[str], default_config: Path) -> list[str]:
    """The arguments, led by the embedded task's config unless they name a config, a model or a data set themselves."""
    chosen = ("--config", "--model_name_or_path", "--dataset_name")
    if any(argument.split("=")[0] in chosen for argument in argv):
        return argv
    return ["--config", str(default_config), *argv]


def main(
    script_args: DeepSeekMathArguments,
    training_args: GRPOExtConfig,
    model_args: ModelConfig,
    trainer_class: type[GRPOExtTrainer] = GRPOExtTrainer,
    panels: Panels = PANELS,
    **trainer_options,
) -> None:
    started = time.perf_counter()
    if script_args.cpu_threads is not None:
        torch.set_num_threads(script_args.cpu_threads or share_of_cores())
    output_dir = Path(training_args.output_dir)
    check_output_dir(output_dir)
    checkpoint = find_checkpoint(training_args.resume_from_checkpoint, output_dir)
    train_dataset, eval_dataset = load_datasets(script_args)
    if eval_dataset is None:
        training_args.eval_strategy = "no"
    of_length = length_rewards(script_args, training_args.max_completion_length)
    reward_funcs = import_functions(script_args.reward_funcs, REWARD_FUNCS | of_length["completion"])
    step_reward_funcs = import_functions(
        script_args.step_reward_funcs or [], STEP_REWARD_FUNCS | of_length["step"], takes_models=True
    )
    check_reward_columns(train_dataset, [*reward_funcs, *step_reward_funcs])
    model_name = model_args.model_name_or_path or str(EMBEDDED_POLICY)
    training_args.model_init_kwargs = model_init_kwargs(model_name, training_args, model_args)

    trainer = trainer_class(
        model=model_name,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset if training_args.eval_strategy != "no" else None,
        processing_class=load_tokenizer(model_name, **without_loading_options(training_args.model_init_kwargs)),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        step_reward_funcs=step_reward_funcs if training_args.scores_steps else None,
        **trainer_options,
    )
    if step_reward_funcs and not training_args.scores_steps:
        trainer.accelerator.print("Outcome supervision: the step reward functions are not used.")
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(CompactProgressCallback)

    before = evaluate(trainer, eval_dataset, script_args)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_locally()
    after = evaluate(trainer, eval_dataset, script_args)
    trainer.create_model_card(dataset_name=script_args.dataset_name)
    if trainer.is_world_process_zero():
        results = {
            "before": before,
            "after": after,
            "seconds": round(time.perf_counter() - started, 1),
            "config": {**asdict(model_args), **asdict(script_args), **training_args.to_dict()},
        }
        report(results, trainer.state.log_history, output_dir, panels)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    # torch deadlocks where the trainer's DDP model is the last to hold the process group: its destructor waits for a
    # thread that waits for the interpreter. So the group outlives the trainer.
    process_group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    trainer.end()
    del trainer
    gc.collect()
    del process_group


def share_of_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def check_output_dir(output_dir: Path) -> None:
    existing = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "a file" if existing.is_file() else "a folder that cannot be written to"
        raise ValueError(f"`output_dir` is '{output_dir}', but '{existing}' is {kind}; name another folder.")


def find_checkpoint(resume_from_checkpoint: str | None, output_dir: Path) -> str | None:
    """The checkpoint to go on from: the one named, or with "true" the last one in the output directory."""
    if resume_from_checkpoint is None or str(resume_from_checkpoint).lower() == "false":
        return None
    if str(resume_from_checkpoint).lower() == "true":
        checkpoint = last_complete_checkpoint(output_dir)
    else:
        checkpoint = resume_from_checkpoint if Path(resume_from_checkpoint).is_dir() else None
    if checkpoint is None:
        raise ValueError(
            f"`resume_from_checkpoint` is {resume_from_checkpoint!r}, but there is no such checkpoint for "
            f"'{output_dir}'; name a folder checkpoint-N, or leave it out to start anew."
        )
    return checkpoint


def load_datasets(script_args: DeepSeekMathArguments) -> tuple[Dataset, Dataset | None]:
    """The training split and the problems to evaluate on, which are no training problems."""
    num_eval = script_args.num_eval_problems
    if script_args.dataset_name is None:
        make_task_dataset = TASKS[script_args.task]
        eval_dataset = make_task_dataset(num_eval, held_out=True, seed=1) if num_eval else None
        return make_task_dataset(script_args.num_train_problems), eval_dataset
    dataset = load_prompt_dataset(script_args.dataset_name, script_args.dataset_config)
    train_split = get_split(dataset, script_args.dataset_train_split, "dataset_train_split")
    train_dataset = to_prompts_and_solutions(train_split, script_args.instruction)
    warn_of_unparsed_solutions(train_dataset, script_args.dataset_train_split)
    if not num_eval:
        return train_dataset, None
    test_split = get_split(dataset, script_args.dataset_test_split, "dataset_test_split")
    eval_dataset = to_prompts_and_solutions(test_split, script_args.instruction)
    train_dataset = without_problems_of(train_dataset, eval_dataset, script_args.dataset_test_split)
    warn_of_unparsed_solutions(eval_dataset, script_args.dataset_test_split)
    return train_dataset, eval_dataset.select(range(min(num_eval, len(eval_dataset))))


def length_rewards(script_args: DeepSeekMathArguments, max_completion_length: int) -> dict[str, dict[str, Callable]]:
    """Rewards of a completion's and of a step's length, which depend on the longest completion."""
    cache = script_args.soft_punish_cache
    cache = max_completion_length // 5 if cache is None else cache
    if cache > max_completion_length:
        raise ValueError(
            f"`soft_punish_cache` is {cache}, but must be at most `max_completion_length`, {max_completion_length}."
        )
    return {
        "completion": {
            "soft_overlong_punishment": get_soft_overlong_punishment(max_completion_length, cache),
            "cosine_scaled_reward": get_cosine_scaled_reward(max_completion_length),
        },
        "step": {"step_overlong_punishment": get_step_overlong_punishment(max_completion_length, cache)},
    }


def import_functions(
    names: list[str] | str, registry: dict[str, Callable], takes_models: bool = False
) -> list[Callable]:
    """The functions of these names in the registry, or at these dotted import paths, or process reward models."""
    return [import_function(name, registry, takes_models) for name in ([names] if isinstance(names, str) else names)]


def import_function(name: str, registry: dict[str, Callable], takes_models: bool = False) -> Callable:
    if name in registry:
        return registry[name]
    if takes_models and ("/" in name or Path(name).is_dir()):
        return ProcessRewardModel(name)
    module_name, _, function_name = name.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"There is no reward function {name!r} ({error}); use {' or '.join(map(repr, registry))}, or the dotted "
            "path of a function that can be imported from here."
        ) from error
    if not callable(function):
        raise ValueError(f"There is no reward function {name!r}: it is {function!r}; name a function.")
    return function


def model_init_kwargs(model_name: str, training_args: GRPOExtConfig, model_args: ModelConfig) -> dict:
    """Arguments for loading the policy, once it is sure that there is one."""
    kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    try:
        AutoConfig.from_pretrained(model_name, **without_loading_options(kwargs))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`model_name_or_path` is {model_name!r}, which is neither a folder with a model nor a model that can be "
            f"reached on the Hub ({str(error).splitlines()[0]})."
        ) from error
    return kwargs


def without_loading_options(kwargs: dict) -> dict:
    return {name: kwargs[name] for name in ("revision", "trust_remote_code", "gguf_file") if name in kwargs}


def evaluate(
    trainer: GRPOExtTrainer, dataset: Dataset | None, script_args: DeepSeekMathArguments
) -> dict[str, float] | None:
    """Evaluate the policy as it is sampled in training: same temperature, same longest completion."""
    if dataset is None:
        return None
    num_samples = script_args.num_eval_samples
    trainer.accelerator.print(f"Evaluating on {len(dataset)} held-out problems, greedily and by {num_samples} samples")
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    with unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, gradient_checkpointing_kwargs=checkpointing
    ) as policy:  # whole, also with ZeRO-3
        return evaluate_policy(
            policy,
            trainer.text_tokenizer,
            dataset,
            num_samples=num_samples,
            temperature=trainer.args.temperature,
            max_new_tokens=trainer.args.max_completion_length,
            batch_size=trainer.args.per_device_eval_batch_size,
            seed=trainer.args.seed,
        )


def report(results: dict, log_history: list[dict], output_dir: Path, panels: Panels) -> None:
    """Write `results.json` and the picture, and show the table."""
    console = Console()
    (output_dir / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
    if find_spec("matplotlib") is None:
        console.print("No picture was drawn: `pip install matplotlib` first.")
    else:
        title = f"GRPO with {results['config']['supervision']} supervision"
        plot_training(log_history, output_dir / "training.png", title, panels)
    if results["before"] is not None:
        console.print(results_table(results["before"], results["after"]))
    console.print(f"Took {results['seconds']:.0f} s. Model, results.json and model card are in {output_dir}/")


def results_table(before: dict[str, float], after: dict[str, float]) -> Table:
    num_problems = int(before["num_problems"])
    table = Table(title=f"Accuracy on {num_problems} held-out problems (%, with 95 % interval)")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right")
    for metric in before:
        if metric != "num_problems":
            change = 100 * (after[metric] - before[metric])
            cells = (with_interval(values[metric], num_problems) for values in (before, after))
            table.add_row(metric, *cells, f"{change:+.1f}")
    return table


def with_interval(accuracy: float, num_problems: int) -> str:
    low, high = confidence_interval(accuracy, num_problems)
    return f"{100 * accuracy:.1f}  ({100 * low:.1f} to {100 * high:.1f})"


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    arguments = with_default_config(sys.argv[1:] if argv is None else argv, DEFAULT_CONFIG)
    main(*make_parser().parse_args_and_config(arguments))


if __name__ == "__main__":
    run()
