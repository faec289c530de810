"""Forward passes that compute what several rows have in common at their start, as a prompt, once."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from .batching import batched, group_cost


# Mean differences of log probabilities, or of scores, below which a model counts as one that can share prompts
ROUNDING, COARSE_ROUNDING = 1e-3, 0.1  # of float32, and of bfloat16, float16 and quantized weights


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
        self.prompt_of = prompt_of
        self.prefix_length = prompt_length - 1
        self.cache_argument = cache_argument

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **kwargs) -> Any:
        prefix = slice(0, self.prefix_length)
        cache = cache_of_rows(
            self.model,
            input_ids[:, prefix],
            attention_mask[:, prefix],
            self.prompt_of,
            self.cache_argument,
            logits_to_keep=1,
        )
        return self.model(
            input_ids=input_ids[:, self.prefix_length :],
            attention_mask=attention_mask,
            labels=labels[:, self.prefix_length :],
            **{self.cache_argument: cache},
            **kwargs,
        )


def cache_of_rows(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_of: torch.Tensor,
    cache_argument: str,
    **kwargs,
) -> Any:
    """
    Keys and values of rows, computed once for all that are equal.

    Args:
        model (`torch.nn.Module`):
            The model.
        input_ids, attention_mask (`torch.Tensor` of shape (B, P)):
            The rows.
        prompt_of (`torch.Tensor` of shape (B,)):
            Numbers without a meaning, equal where rows are.
        cache_argument (`str`):
            What the model's forward calls past keys and values.
        **kwargs:
            Further arguments of the model.

    Returns:
        [`~transformers.Cache`] with an entry for each row.
    """
    prompts, place = prompt_of.unique(return_inverse=True)
    rows = torch.arange(len(place), device=place.device)
    first = rows.new_full((len(prompts),), len(rows)).scatter_reduce(0, place, rows, "amin")
    outputs = model(input_ids=input_ids[first], attention_mask=attention_mask[first], use_cache=True, **kwargs)
    cache = outputs[cache_argument]
    cache.batch_select_indices(place)
    return cache


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


def prefix_batches(
    rows: Sequence[list[int]], shared_up_to: Sequence[int], batch_size: int
) -> list[tuple[list[int], int]]:
    """
    Cut rows of ids into batches that compute little: of rows that are as long, or of rows that begin alike.

    Args:
        rows (`Sequence[list[int]]` of length B):
            The ids.
        shared_up_to (`Sequence[int]` of length B):
            How many ids at the start of each row may be computed for other rows as well: no output is needed there.
        batch_size (`int`):
            Number of rows in a batch.

    Returns:
        `list[tuple[list[int], int]]`: for each batch the indices of its rows, and how many ids at their start to
        compute once for all that begin with them, 0 for none. The batch that computes most is first, so that what does
        not fit in memory shows at once.
    """
    by_length = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    by_beginning = sorted(range(len(rows)), key=lambda row: rows[row])
    plans = []
    for order in (by_length, by_beginning):
        batches = list(batched(order, batch_size))
        prefixes = [
            cheapest_prefix([rows[row] for row in batch], min(shared_up_to[row] for row in batch)) for batch in batches
        ]
        costs = [cost for _, cost in prefixes]
        plan = [(batch, length) for batch, (length, _) in zip(batches, prefixes, strict=True)]
        plans.append((sum(costs), [plan[index] for index in sorted(range(len(plan)), key=lambda i: -costs[i])]))
    return min(plans, key=lambda plan: plan[0])[1]


def cheapest_prefix(rows: list[list[int]], longest: int) -> tuple[int, int]:
    """How many ids at the start of rows, `longest` at most, are best computed once, and what the batch costs then."""
    common = [common_length(*neighbours) for neighbours in pairwise(sorted(rows))]
    end = max(map(len, rows))
    options = [(group_cost(len(rows), len(rows), 0, 0, end), 0)]
    for length in {min(length, longest) for length in common} - {0}:
        num_prefixes = 1 + sum(other < length for other in common)
        options.append((group_cost(len(rows), num_prefixes, 0, length, end), length))
    cost, length = min(options)
    return length, cost


def common_length(first: list[int], second: list[int]) -> int:
    """Number of ids at the start of two rows that are the same."""
    differ = (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward calls past keys and values: `cache`, and before transformers 5.20 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def computes_coarsely(model: Any) -> bool:
    """Whether a model computes in half precision or with quantized weights, where rounding is no small matter."""
    return model.dtype not in (torch.float32, torch.float64) or getattr(model, "is_quantized", False)


def has_dropout(model: Any) -> bool:
    """Whether a forward pass in train mode drops out, so that rows with one prompt would share its mask."""
    config = model.config.get_text_config()
    of_config = any(getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
    return of_config or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def recomputes_activations(model: torch.nn.Module) -> bool:
    """Whether layers forget their activations until the backward pass, and with these keys and values."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
