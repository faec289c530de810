"""
Peak memory of iterative GRPO with one base model for policy, reference and reward model, and with three.

    python -m tests.benchmarks.shared_base_memory

Both sides do the same work (sampling, reference, policy steps, scoring, reward model updates, all with adapters) in a
process of their own; what is printed is the growth of a process over what it holds before a model is loaded.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from trl_grpo_ext import IterativeGRPOConfig, IterativeGRPOTrainer

from ..iterative.helpers import parity_verifier
from ..tiny import prompt_dataset, tiny_tokenizer
from ..trainers.helpers import SETTINGS
from .memory import peak_bytes


LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
MODEL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}


def save_models(folder: Path) -> int:
    """A base model, and a reward adapter on it; the number of the base's bytes."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        **MODEL, vocab_size=len(tokenizer), max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    scorer = LlamaForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    get_peft_model(scorer, LoraConfig(**LORA, modules_to_save=["score"])).save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def run(folder: Path, shared: bool) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "max_steps"}
    args = IterativeGRPOConfig(
        **settings, output_dir=str(folder / str(shared)), num_rl_iterations=2, steps_per_rl_iteration=1,
        shared_base=shared, reference_update="reset" if shared else "none", reward_model_batch_size=2,
    )  # fmt: skip
    policy = LlamaForCausalLM.from_pretrained(folder / "base")
    if not shared:
        # The same adapters, but in a model that TRL does not know as a PEFT model, so that it loads a reference model
        policy = inject_adapter_in_model(LoraConfig(**LORA), policy)
    trainer = IterativeGRPOTrainer(
        policy,
        args=args,
        train_dataset=prompt_dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(**LORA) if shared else None,
        reward_model=str(folder / "adapter"),
        verifier=parity_verifier,
    )
    if not shared:
        trainer._move_reference = lambda share: None  # it is the policy's base model already
    trainer.train()


def prepare(folder: Path, shared: bool) -> Callable[[], None]:
    return partial(run, folder, shared)  # with the models, so that these are measured


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        size = save_models(Path(name))
        peaks = {shared: peak_bytes(prepare, Path(name), shared) for shared in (False, True)}
    print(f"base model {size / 2**20:.0f} MiB")
    print(f"three models {peaks[False] / 2**20:.0f} MiB, one base {peaks[True] / 2**20:.0f} MiB: ratio "
          f"{peaks[True] / peaks[False]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
