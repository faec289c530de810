"""Which rows to forward together, and how much of a padded batch, so that little padding is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch


Row = TypeVar("Row")
Result = TypeVar("Result")
PASS_TOKENS = 512  # what one more forward pass costs, in tokens: below it rows are not worth separating
MOST_GROUPS = 32


def batched(items: list[Row], size: int) -> Iterator[list[Row]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def map_by_length(
    function: Callable[[list[list[int]]], Sequence[Result]], rows: Sequence[list[int]], batch_size: int
) -> list[Result]:
    """The results of a function of batches of ids, for each row, with rows of similar length in one batch."""
    # Longest first, so that what does not fit in memory shows at once
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    results: dict[int, Result] = {}
    for batch in batched(order, batch_size):
        results.update(zip(batch, function([rows[index] for index in batch]), strict=True))
    return [results[index] for index in range(len(rows))]


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """Within it a model is in eval mode; afterwards in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def pad_right(rows: Sequence[list[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Ids as a batch, masked so that what is computed of a row neither sees nor is moved by the padding."""
    length = max(map(len, rows))
    ids = [row + [pad_token_id] * (length - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (length - len(row)) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


@dataclass(frozen=True)
class RowGroup:
    """
    Some rows of a batch and the columns that hold all of their tokens.

    Args:
        rows (`torch.Tensor` of shape (b,)):
            Indices of the rows.
        start, end (`int`):
            First column, and the one after the last.
    """

    rows: torch.Tensor
    start: int
    end: int


def length_groups(
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    trims_left: bool,
    splits: bool,
    prompt_of: torch.Tensor | None = None,
) -> list[RowGroup]:
    """
    Cut a batch into groups of rows of similar length, each without the columns that are padding in all of its rows.

    Args:
        attention_mask (`torch.Tensor` of shape (B, T)):
            1 for tokens, 0 for padding, on the left of prompts and on the right of completions.
        logits_to_keep (`int`):
            Number of columns of completions, the last ones. One of them is kept in each group at least.
        trims_left (`bool`):
            Whether columns on the left may go, which moves the positions of the tokens.
        splits (`bool`):
            Whether there may be more than one group.
        prompt_of (`torch.Tensor` of shape (B,), *optional*):
            Which prompt each row has, where it is computed once for all rows of a group that have it.

    Returns:
        `list[RowGroup]`: each row is in one group. Of all ways to cut them, in the order of their lengths, the one
        that computes least, counting [`PASS_TOKENS`] for each pass.
    """
    starts, ends = spans(attention_mask, logits_to_keep, trims_left)
    _, parts = cheapest_parts(starts, ends, prompt_of, attention_mask.shape[1] - logits_to_keep, splits)
    return [RowGroup(rows, int(starts[rows].min()), int(ends[rows].max())) for rows in parts]


def cheapest_order(
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    trims_left: bool,
    splits: bool,
    batch_size: int,
    prompt_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    An order of rows in which batches of neighbours compute little: of rows as long, or of rows with one prompt.

    Args:
        attention_mask, logits_to_keep, trims_left, splits, prompt_of:
            As of [`length_groups`], into which each batch is cut.
        batch_size (`int`):
            Number of rows in a batch, of which B is a multiple.

    Returns:
        `torch.Tensor` of shape (B,): indices of the rows.
    """
    starts, ends = spans(attention_mask, logits_to_keep, trims_left)
    # Longest first, so that what does not fit in memory shows at once
    by_length = (ends - starts).argsort(descending=True, stable=True)
    if prompt_of is None:
        return by_length
    prompt_of = prompt_of.cpu()
    by_prompt = by_length[prompt_of[by_length].argsort(stable=True)]
    first_completion = attention_mask.shape[1] - logits_to_keep

    def cost(order: torch.Tensor) -> int:
        return sum(
            cheapest_parts(starts[rows], ends[rows], prompt_of[rows], first_completion, splits)[0]
            for rows in order.split(batch_size)
        )

    return min((by_length, by_prompt), key=cost)


def spans(attention_mask: torch.Tensor, logits_to_keep: int, trims_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """First column of each row's tokens, and the one after the last, as [`length_groups`] may cut them, each (B,)."""
    is_token = attention_mask.bool()
    length = attention_mask.shape[1]
    first_completion = length - logits_to_keep
    ends = (length - is_token.flip(1).int().argmax(1)).clamp(min=first_completion + 1)
    starts = is_token.int().argmax(1).clamp(max=first_completion - 1).clamp(min=0)
    if not trims_left:
        starts = torch.zeros_like(starts)
    starts, ends = torch.stack([starts, ends]).cpu()  # once, instead of waiting for the device at each group
    return starts, ends


def cheapest_parts(
    starts: torch.Tensor, ends: torch.Tensor, prompt_of: torch.Tensor | None, first_completion: int, splits: bool
) -> tuple[int, list[torch.Tensor]]:
    """What the parts of a batch, cut in the order of its rows' lengths, cost at least, and the rows of each."""
    order = (ends - starts if prompt_of is None else ends).argsort(stable=True)
    prompts = None if prompt_of is None else prompt_of[order].tolist()
    cost, cuts = cheapest_cuts(starts[order].tolist(), ends[order].tolist(), prompts, first_completion, splits)
    return cost, [order[first:last] for first, last in pairwise(cuts)]


def cheapest_cuts(
    starts: list[int], ends: list[int], prompts: list[int] | None, first_completion: int, splits: bool
) -> tuple[int, list[int]]:
    """
    Where to cut rows, in the order in which they are given, so that their groups compute least.

    Args:
        starts, ends (`list[int]` of length B):
            First column of each row, and the one after its last.
        prompts (`list[int]` of length B, *optional*):
            Which prompt each row has, where it is computed once a group.
        first_completion (`int`):
            Number of columns of prompts.
        splits (`bool`):
            Whether there may be more than one group.

    Returns:
        `tuple[int, list[int]]`: what the groups cost, and where they are cut: 0, the first row of each further group,
        and B.
    """
    num_rows = len(starts)
    num_places = min(num_rows, MOST_GROUPS) if splits else 1
    places = [num_rows * place // num_places for place in range(num_places + 1)]
    # Of the rows before each place, what the cheapest groups compute and where they are cut
    cheapest: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for index, last in enumerate(places[1:], start=1):
        options = []
        for first in places[:index]:
            rows = slice(first, last)
            num_prompts = last - first if prompts is None else len(set(prompts[rows]))
            cost, cuts = cheapest[first]
            cost += group_cost(last - first, num_prompts, min(starts[rows]), first_completion, max(ends[rows]))
            options.append((cost, [*cuts, last]))
        cheapest[last] = min(options)
    return cheapest[num_rows]


def group_cost(num_rows: int, num_prompts: int, start: int, first_completion: int, end: int) -> int:
    """Tokens that a group's forward passes compute, and what the passes cost besides."""
    tokens = num_prompts * (first_completion - start) + num_rows * (end - first_completion)
    return tokens + PASS_TOKENS * (1 if num_prompts == num_rows else 2)


def scatter_groups(parts: list[torch.Tensor], groups: list[RowGroup], length: int) -> torch.Tensor:
    """
    Put what was computed of each group's completions back in its place.

    Args:
        parts (`list[torch.Tensor]` of shapes (b, t)):
            For each group, values of its last columns.
        groups (`list[RowGroup]`):
            The groups, of a batch of B rows together.
        length (`int`):
            Number of columns of completions, T.

    Returns:
        `torch.Tensor` of shape (B, T), 0 where nothing was computed.
    """
    padded = [torch.nn.functional.pad(part, (0, length - part.shape[1])) for part in parts]
    order = torch.cat([group.rows for group in groups])
    return torch.cat(padded)[order.argsort()]
