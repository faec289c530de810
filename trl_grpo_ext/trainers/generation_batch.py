"""TRL's generation batches cut into the groups of their prompts and put together again, and further prompts."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch


LEFT_PADDED = ("prompt_ids", "prompt_mask")


class PromptStream:
    """
    Rows of a data set, each epoch in another order.

    Args:
        num_rows (`int`):
            Number of rows.
        seed (`int`):
            Seed of the orders.
        position (`int`, *optional*, defaults to `0`):
            How many were taken before.
    """

    def __init__(self, num_rows: int, seed: int, position: int = 0):
        self.num_rows = num_rows
        self.seed = seed
        self.position = position

    def take(self, number: int) -> list[int]:
        """The next rows."""
        start = self.position
        self.position += number
        return list(islice(self._rows_from(start), number))

    def _rows_from(self, position: int) -> Iterator[int]:
        for epoch in count(position // self.num_rows):
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.num_rows, generator=generator)
            yield from order[position % self.num_rows :].tolist()
            position = 0


class Window:
    """
    The groups that are to be trained on next, those without an advantage other than 0 still to be replaced.

    Args:
        groups (`list[dict[str, torch.Tensor]]`):
            The groups as sampled first.
    """

    def __init__(self, groups: list[dict[str, torch.Tensor]]):
        self.groups = groups
        self.empty = [place for place, group in enumerate(groups) if not is_live(group)]

    def fill(self, groups: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Replace by these groups, the first ones first; returns what is left over."""
        places, self.empty = self.empty[: len(groups)], self.empty[len(groups) :]
        for place, group in zip(places, groups, strict=False):
            self.groups[place] = group
        return groups[len(places) :]


def split_groups(batch: dict[str, Any], num_generations: int) -> list[dict[str, torch.Tensor]]:
    """
    Cut a generation batch into its groups.

    Args:
        batch (`dict`):
            Tensors with B rows, the completions of a prompt one after another; what is no tensor, or has no rows, is
            left out.
        num_generations (`int`):
            Rows of a group, G.

    Returns:
        `list[dict[str, torch.Tensor]]` of length B / G.
    """
    rows = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    parts = {key: value.split(num_generations) for key, value in rows.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def join_groups(groups: list[dict[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """
    Put groups together, whatever their lengths.

    Args:
        groups (`list[dict[str, torch.Tensor]]`):
            Groups with the same keys: prompts are padded on the left, all else on the right.
        pad_token_id (`int`):
            Padding of ids; other padding is 0.
    """
    return {
        key: torch.cat(
            pad_alike([group[key] for group in groups], key in LEFT_PADDED, pad_token_id * key.endswith("_ids"))
        )
        for key in groups[0]
    }


def pad_alike(tensors: list[torch.Tensor], on_the_left: bool, value: int) -> list[torch.Tensor]:
    """Tensors of shape (G, t) with as many columns as the widest, or of shape (G,) as they are."""
    if tensors[0].dim() == 1:
        return tensors
    width = max(tensor.shape[1] for tensor in tensors)
    gaps = [width - tensor.shape[1] for tensor in tensors]
    return [
        torch.nn.functional.pad(tensor, (gap, 0) if on_the_left else (0, gap), value=value)
        for tensor, gap in zip(tensors, gaps, strict=True)
    ]


def is_live(group: dict[str, torch.Tensor]) -> bool:
    """Whether a group has an advantage other than 0."""
    return bool((group["advantages"] != 0).any())
