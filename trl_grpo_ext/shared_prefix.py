"""A forward pass that computes the prompt which several completions have in common once."""

import inspect
from typing import Any

import torch


class SharedPrefix:
    """
    A causal LM, to be called as TRL calls its own, that computes each distinct prompt once for all of its completions.

    The prompts but for their last token go through the model alone; the completions, led by that token, then attend
    to the keys and values that this has left. Gradients flow back through these. The numbers are those of whole rows,
    to rounding, where all that a model knows of the past is in its keys and values.

    Args:
        model (`torch.nn.Module`):
            The model, as wrapped for training.
        prompt_of (`torch.Tensor` of shape (B,)):
            Which prompt each row has, as numbers without a meaning.
        prompt_length (`int`):
            Number of columns of prompts, padded on the left.
        cache_argument (`str`):
            What the model's forward calls past keys and values.
    """

    def __init__(self, model: torch.nn.Module, prompt_of: torch.Tensor, prompt_length: int, cache_argument: str):
        self.model = model
        self.prompts, self.place = prompt_of.unique(return_inverse=True)
        self.prefix_length = prompt_length - 1
        self.cache_argument = cache_argument

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs) -> Any:
        first = self._first_rows()
        prefix = slice(0, self.prefix_length)
        outputs = self.model(
            input_ids=input_ids[first, prefix],
            attention_mask=attention_mask[first, prefix],
            use_cache=True,
            logits_to_keep=1,
        )
        cache = outputs.past_key_values
        cache.batch_select_indices(self.place)
        return self.model(
            input_ids=input_ids[:, self.prefix_length :],
            attention_mask=attention_mask,
            labels=labels[:, self.prefix_length :],
            **{self.cache_argument: cache},
            **kwargs,
        )

    def _first_rows(self) -> torch.Tensor:
        """A row of each prompt."""
        rows = torch.arange(len(self.place), device=self.place.device)
        none = rows.new_full((len(self.prompts),), len(rows))
        return none.scatter_reduce(0, self.place, rows, "amin")


def number_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """
    Tell which rows have the same prompt.

    Args:
        input_ids, attention_mask (`torch.Tensor` of shape (B, T)):
            Prompts, padded on the left to `prompt_length` columns, and completions.
        prompt_length (`int`):
            Number of columns of prompts.

    Returns:
        `torch.Tensor` of shape (B,): a number for each row, equal where the prompts are.
    """
    prompts = input_ids[:, :prompt_length].masked_fill(attention_mask[:, :prompt_length] == 0, -1)
    return prompts.unique(dim=0, return_inverse=True)[1]


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward calls past keys and values: `cache`, and before transformers 5.20 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def has_dropout(model: Any) -> bool:
    """Whether a forward pass in train mode drops out, so that rows with one prompt would share its mask."""
    config = model.config.get_text_config()
    of_config = any(getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
    return of_config or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def recomputes_activations(model: torch.nn.Module) -> bool:
    """Whether layers forget their activations until the backward pass, and with these keys and values."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
