"""
Make the embedded policy: supervised fine-tuning of a small Llama on the solutions of a careless tutor.

    python -m trl_grpo_ext.scripts.warm_start --output_dir first
    python -m trl_grpo_ext.scripts.warm_start --start_from first --seed 43 --num_train_epochs 1 --learning_rate 1.5e-3

The second round, on problems of its own, makes the policy surer of sums that are rare in the first.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer, TrlParser

from trl_grpo_ext.tasks.tokenizer import build_tokenizer
from trl_grpo_ext.tasks.word_problems import imperfect_solution, sample_problems, word_problem


@dataclass
class WarmStartArguments:
    """
    Arguments of the warm start.

    Args:
        num_problems (`int`, *optional*, defaults to `60000`):
            Number of distinct problems the tutor solves.
        slip_rate (`float`, *optional*, defaults to `0.2`):
            Probability that a result the tutor writes is wrong.
        start_from (`str`, *optional*):
            Folder of a policy to train further, instead of a fresh one.
    """

    num_problems: int = field(default=60_000, metadata={"help": "Number of distinct problems the tutor solves."})
    slip_rate: float = field(default=0.2, metadata={"help": "Probability that a result the tutor writes is wrong."})
    start_from: str | None = field(default=None, metadata={"help": "Folder of a policy to train further."})


@dataclass
class WarmStartConfig(SFTConfig):
    output_dir: str = "policy"
    per_device_train_batch_size: int = 128
    num_train_epochs: float = 2.0
    learning_rate: float = 3e-3
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    save_strategy: str = "no"
    report_to: str = "none"
    logging_steps: float = 50
    gradient_checkpointing: bool = False
    bf16: bool = False
    eos_token: str = "<|end|>"


def tutored_dataset(num_problems: int, slip_rate: float, seed: int) -> Dataset:
    """Prompt/completion pairs: problems of the training split as the tutor solves them."""
    rng = random.Random(seed)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": word_problem(problem, rng)}],
                "completion": [{"role": "assistant", "content": imperfect_solution(problem, rng, slip_rate)}],
            }
            for problem in sample_problems(num_problems, held_out=False, seed=seed)
        ]
    )


def fresh_policy(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def main(script_args: WarmStartArguments, training_args: SFTConfig) -> None:
    set_seed(training_args.seed)
    tokenizer = build_tokenizer()
    start_from = script_args.start_from
    model = LlamaForCausalLM.from_pretrained(start_from) if start_from else fresh_policy(tokenizer)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=tutored_dataset(script_args.num_problems, script_args.slip_rate, training_args.seed),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


def make_parser() -> TrlParser:
    return TrlParser((WarmStartArguments, WarmStartConfig))


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    main(*make_parser().parse_args_and_config(argv))


if __name__ == "__main__":
    run()
