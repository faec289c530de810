r"""
DeepSeekMath's iterative GRPO (arXiv:2402.03300, Algorithm 1): the reward model learns along, the reference follows.

Without arguments it trains the embedded policy for two iterations, with an outcome reward model that is first made
from the embedded judge, in minutes on two CPU cores:

    accelerate launch -m trl_grpo_ext.scripts.iterative_grpo

For a real model name a reward model too:

    accelerate launch -m trl_grpo_ext.scripts.iterative_grpo \
        --config my_config.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --reward_model_name_or_path my-org/my-reward-model --dataset_name openai/gsm8k --dataset_config main
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    set_seed,
)
from trl import ModelConfig, TrlParser

from ..callbacks import ITERATION_PANELS
from ..iterative.outcome_reward_model import OutcomeRewardModel
from ..iterative.reward_update import OutcomeUpdate, ProcessUpdate, RewardUpdate
from ..prm.formats import TokenClassificationFormat
from ..prm.process_reward_model import ProcessRewardModel
from ..tasks import EMBEDDED_JUDGE
from ..tasks.word_problems import imperfect_solution, sample_problems, word_problem
from ..trainers.iterative_config import IterativeGRPOConfig
from ..trainers.iterative_trainer import IterativeGRPOTrainer
from .deepseekmath import STEP_REWARD_FUNCS, DeepSeekMathArguments, import_function, with_default_config
from .deepseekmath import main as train_and_report
from .train_prm import tutored_steps


DEFAULT_CONFIG = Path(__file__).with_name("iterative_embedded.yaml")


@dataclass
class IterativeGRPOArguments(DeepSeekMathArguments):
    """
    Arguments of the job besides the trainer's and the model's: those of the main job, and of the reward model.

    Args:
        reward_funcs (`list[str]`, *optional*, defaults to `[]`):
            Reward functions that are added to the reward model's.
        reward_model_name_or_path (`str`, *optional*):
            Reward model: a Hub id or a folder. Without it one is made for the embedded task.
        step_verifier (`str`, *optional*):
            Rule that labels steps for `reward_update="process"`: `"working_reward"` (embedded task only),
            `"arithmetic_reward"`, or the dotted import path of a step reward function. Without it steps are labelled
            by sampling.
        num_tutored_problems (`int`, *optional*, defaults to `1500`):
            Number of problems from whose tutored solutions the embedded task's first reward model is made.
    """

    reward_funcs: list[str] = field(
        default_factory=list, metadata={"help": "Reward functions that are added to the reward model's."}
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model: a Hub id or a folder."}
    )
    step_verifier: str | None = field(
        default=None, metadata={"help": "Rule that labels steps; without it they are labelled by sampling."}
    )
    num_tutored_problems: int = field(
        default=1500, metadata={"help": "Number of problems that the first reward model is made from."}
    )


def main(script_args: IterativeGRPOArguments, training_args: IterativeGRPOConfig, model_args: ModelConfig) -> None:
    step_verifier = script_args.step_verifier
    train_and_report(
        script_args,
        training_args,
        model_args,
        trainer_class=IterativeGRPOTrainer,
        panels=ITERATION_PANELS,
        reward_model=script_args.reward_model_name_or_path or first_reward_model(script_args, training_args),
        step_verifier=import_function(step_verifier, STEP_REWARD_FUNCS) if step_verifier else None,
    )


def first_reward_model(script_args: IterativeGRPOArguments, training_args: IterativeGRPOConfig) -> Path:
    """The embedded task's first reward model, made from the judge unless an earlier start has made it."""
    if script_args.dataset_name is not None:
        raise ValueError(
            f"`reward_model_name_or_path` is missing for `dataset_name` {script_args.dataset_name!r}; name a reward "
            "model, or leave the data set out for the embedded task."
        )
    folder = Path(training_args.output_dir, "_first_reward_model")
    if not (folder / "config.json").exists():
        set_seed(training_args.seed)
        is_process = training_args.supervision == "process"
        update = embedded_process_model() if is_process else embedded_outcome_model()
        make_examples = tutored_steps_and_labels if is_process else tutored_pairs
        examples = make_examples(update, script_args.num_tutored_problems, training_args.seed)
        PartialState().print(f"Making the first reward model from {len(examples)} tutored examples")
        options = {
            "output_dir": training_args.output_dir,
            "per_device_train_batch_size": 32 // PartialState().num_processes,
            "use_cpu": training_args.use_cpu,
            "bf16": training_args.bf16,
            "dataloader_pin_memory": training_args.dataloader_pin_memory,
            "seed": training_args.seed,
        }
        update.train(examples, options)
        if PartialState().is_main_process:
            update.save_model(folder)
    PartialState().wait_for_everyone()
    return folder


def embedded_outcome_model() -> RewardUpdate:
    model = AutoModelForSequenceClassification.from_pretrained(EMBEDDED_JUDGE, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_JUDGE)
    return OutcomeUpdate(OutcomeRewardModel(model, tokenizer=tokenizer), learning_rate=5e-5, head_learning_rate=5e-3)


def embedded_process_model() -> RewardUpdate:
    model = AutoModelForTokenClassification.from_pretrained(EMBEDDED_JUDGE, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_JUDGE)
    prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format=TokenClassificationFormat())
    return ProcessUpdate(prm, learning_rate=5e-5, head_learning_rate=5e-3)


def tutored_pairs(update: RewardUpdate, num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Of each problem a right and a wrong one of the tutor's solutions, encoded."""
    rng = random.Random(seed)
    pairs = []
    for problem in sample_problems(num_problems, held_out=False, seed=seed):
        prompt = [{"role": "user", "content": word_problem(problem, rng)}]
        right = f"{{{problem.totals[-1]}}}"
        solutions: dict[bool, str] = {}
        while len(solutions) < 2:
            solution = imperfect_solution(problem, rng, slip_rate=0.2)
            solutions[right in solution] = solution
        chosen, rejected = ([{"role": "assistant", "content": solutions[is_right]}] for is_right in (True, False))
        pairs.append(
            {
                "chosen_ids": update.model.encode(prompt, chosen),
                "rejected_ids": update.model.encode(prompt, rejected),
            }
        )
    return pairs


def tutored_steps_and_labels(update: RewardUpdate, num_problems: int, seed: int) -> list[dict[str, Any]]:
    return tutored_steps(num_problems, held_out=False, seed=seed).to_list()


def make_parser() -> TrlParser:
    return TrlParser((IterativeGRPOArguments, IterativeGRPOConfig, ModelConfig))


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    arguments = with_default_config(sys.argv[1:] if argv is None else argv, DEFAULT_CONFIG)
    main(*make_parser().parse_args_and_config(arguments))


if __name__ == "__main__":
    run()
