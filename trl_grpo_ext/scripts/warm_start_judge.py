"""
Make the embedded judge: the embedded policy with two more layers, which learn to notice the first wrong token.

    python -m trl_grpo_ext.scripts.warm_start_judge

The tutor's solutions are labelled at each token by whether all is right so far, as ELECTRA's discriminators
(arXiv:2003.10555) are taught to notice replaced tokens. The policy's own layers stay as they are. What comes out is a
base model without a head, from which reward models of either kind are trained in a minute; from the policy itself,
whose layers can solve a problem but not compare, they learn next to nothing.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from trl import TrlParser

from ..prm.formats import prompt_ids
from ..tasks import EMBEDDED_POLICY
from ..tasks.word_problems import imperfect_solution, reference_solution, sample_problems, word_problem
from ..trainers.prm_config import PRMConfig
from ..trainers.prm_trainer import IGNORED, PRMTrainer


@dataclass
class WarmStartJudgeArguments:
    """
    Arguments of the judge's warm start.

    Args:
        num_problems (`int`, *optional*, defaults to `50000`):
            Number of distinct problems the tutor solves.
        slip_rate (`float`, *optional*, defaults to `0.2`):
            Probability that a result the tutor writes is wrong.
        num_new_layers (`int`, *optional*, defaults to `2`):
            Number of layers on top of the policy's.
    """

    num_problems: int = field(default=50_000, metadata={"help": "Number of distinct problems the tutor solves."})
    slip_rate: float = field(default=0.2, metadata={"help": "Probability that a result the tutor writes is wrong."})
    num_new_layers: int = field(default=2, metadata={"help": "Number of layers on top of the policy's."})


@dataclass
class WarmStartJudgeConfig(PRMConfig):
    output_dir: str = "judge"
    per_device_train_batch_size: int = 32
    num_train_epochs: float = 7.0
    learning_rate: float = 2e-3
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 100
    adam_beta2: float = 0.98
    save_strategy: str = "no"
    report_to: str = "none"
    logging_steps: float = 200
    gradient_checkpointing: bool = False
    bf16: bool = False


def judged_tokens(tokenizer: PreTrainedTokenizerBase, prompt: list, solution: str, reference: str) -> dict[str, list]:
    """Ids of a problem and a solution, each token of the solution labelled by whether all is right so far."""
    ids = prompt_ids(tokenizer, prompt)
    labels = [IGNORED] * len(ids)
    written = tokenizer.encode(solution, add_special_tokens=False)
    for index in range(len(written)):
        ids.append(written[index])
        labels.append(float(reference.startswith(tokenizer.decode(written[: index + 1]))))
    return {"input_ids": [*ids, tokenizer.eos_token_id], "labels": [*labels, float(solution == reference)]}


def judged_dataset(tokenizer: PreTrainedTokenizerBase, num_problems: int, slip_rate: float, seed: int) -> Dataset:
    rng = random.Random(seed)
    return Dataset.from_list(
        [
            judged_tokens(
                tokenizer,
                [{"role": "user", "content": word_problem(problem, rng)}],
                imperfect_solution(problem, rng, slip_rate),
                reference_solution(problem),
            )
            for problem in sample_problems(num_problems, held_out=False, seed=seed)
        ]
    )


def main(script_args: WarmStartJudgeArguments, training_args: WarmStartJudgeConfig) -> None:
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)
    policy_layers = AutoModelForTokenClassification.from_pretrained(EMBEDDED_POLICY).config.num_hidden_layers
    model = AutoModelForTokenClassification.from_pretrained(
        EMBEDDED_POLICY, num_labels=2, num_hidden_layers=policy_layers + script_args.num_new_layers
    )
    new_layers = tuple(f"model.layers.{policy_layers + index}." for index in range(script_args.num_new_layers))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith((*new_layers, "model.norm.", "score.")))
    trainer = PRMTrainer(
        model=model,
        args=training_args,
        train_dataset=judged_dataset(tokenizer, script_args.num_problems, script_args.slip_rate, training_args.seed),
        processing_class=tokenizer,
    )
    trainer.train()
    model.base_model.save_pretrained(training_args.output_dir)
    tokenizer.save_pretrained(training_args.output_dir)


def make_parser() -> TrlParser:
    return TrlParser((WarmStartJudgeArguments, WarmStartJudgeConfig))


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    main(*make_parser().parse_args_and_config(argv))


if __name__ == "__main__":
    run()
