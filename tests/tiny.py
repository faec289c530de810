"""Tiny models, tokenizers and data sets that the tests make for themselves."""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_grpo_ext.tasks.tokenizer import build_tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(vocab_size=300, num_problems=50)


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, hidden_size: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    # Many tokens end a completion, so that random completions have many lengths.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 120)]
    return model


def save_tiny_model(path, seed: int = 0, hidden_size: int = 16) -> str:
    """A folder with a tiny model and its tokenizer, as the reference model is loaded from."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed, hidden_size).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def prompt_dataset(num_rows: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"Count {index}:" for index in range(num_rows)], "solution": [str(i) for i in range(num_rows)]}
    )
