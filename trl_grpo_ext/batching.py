"""Which rows of a padded batch to forward together, and how much of them, so that little padding is computed."""

from dataclasses import dataclass

import torch


PASS_TOKENS = 512  # what one more forward pass costs, in tokens: below it rows are not worth separating
NUM_GROUPS = (1, 2, 4, 8)


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

    @property
    def cost(self) -> int:
        return len(self.rows) * (self.end - self.start) + PASS_TOKENS


def length_groups(attention_mask: torch.Tensor, logits_to_keep: int, trims_left: bool, splits: bool) -> list[RowGroup]:
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

    Returns:
        `list[RowGroup]`: each row is in one group. Of the numbers of groups in [`NUM_GROUPS`] the one that computes
        least, counting [`PASS_TOKENS`] for each group.
    """
    is_token = attention_mask.bool()
    length = attention_mask.shape[1]
    first_completion = length - logits_to_keep
    ends = (length - is_token.flip(1).int().argmax(1)).clamp(min=first_completion + 1)
    starts = is_token.int().argmax(1).clamp(max=first_completion - 1).clamp(min=0)
    if not trims_left:
        starts = torch.zeros_like(starts)
    order = (ends - starts).argsort(stable=True)
    plans = [
        [RowGroup(rows, int(starts[rows].min()), int(ends[rows].max())) for rows in order.tensor_split(count)]
        for count in (NUM_GROUPS if splits else NUM_GROUPS[:1])
        if count <= len(order)
    ]
    return min(plans, key=lambda groups: sum(group.cost for group in groups))


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
