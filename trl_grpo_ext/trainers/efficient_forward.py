from typing import Any

import torch

from ..batching import RowGroup, length_groups, scatter_groups
from .seams import GRPOSeams


class EfficientForward(GRPOSeams):
    """The same log probabilities for less work: without padding, and without a backward pass where it would give 0."""

    def logps_and_entropies(self, *args, **kwargs):
        compute = super().logps_and_entropies
        if len(args) != 4 or is_multimodal(kwargs):
            return compute(*args, **kwargs)
        model, input_ids, attention_mask, logits_to_keep = args
        groups = self._row_groups(attention_mask, logits_to_keep)
        if not groups:
            return compute(*args, **kwargs)
        results = []
        for group, has_gradient in groups:
            columns = slice(group.start, group.end)
            keep = logits_to_keep - (input_ids.shape[1] - group.end)
            with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
                results.append(
                    compute(model, input_ids[group.rows, columns], attention_mask[group.rows, columns], keep, **kwargs)
                )
        row_groups = [group for group, _ in groups]
        return tuple(
            None if values[0] is None else scatter_groups(list(values), row_groups, logits_to_keep)
            for values in zip(*results, strict=True)
        )

    def _row_groups(self, attention_mask: torch.Tensor, logits_to_keep: int) -> list[tuple[RowGroup, bool]]:
        """Groups of rows to forward, and whether they have a gradient; none where all is forwarded as it is."""
        # The router's loss is of the whole batch, and the exact KL wants the hidden states of one forward pass.
        if self.aux_loss_enabled or self.needs_hidden_states or self.positions_depend_on_length:
            return []
        groups = [
            (RowGroup(rows[group.rows], group.start, group.end), moving)
            for rows, moving in divide(self._rows_that_train(attention_mask))
            for group in self._length_groups(attention_mask[rows], logits_to_keep)
        ]
        is_whole = len(groups) == 1 and groups[0][0].end - groups[0][0].start == attention_mask.shape[1]
        return [] if is_whole else groups

    def _length_groups(self, attention_mask: torch.Tensor, logits_to_keep: int) -> list[RowGroup]:
        if not getattr(self.args, "efficient_microbatches", False):
            return [RowGroup(torch.arange(len(attention_mask)), 0, attention_mask.shape[1])]
        return length_groups(attention_mask, logits_to_keep, self.positions_are_relative, self.may_forward_in_parts)

    def _rows_that_train(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Whether each row's loss has a gradient, (B,)."""
        moves = attention_mask.new_ones(len(attention_mask), dtype=torch.bool)
        skips = getattr(self.args, "skip_zero_advantage", False) and self.may_forward_in_parts
        if skips and self._loss_inputs is not None and torch.is_grad_enabled() and not self.trains_without_advantage:
            advantages = self._loss_inputs["advantages"]
            moves = (advantages != 0).reshape(len(advantages), -1).any(1)
            if not moves.any():
                moves[attention_mask.sum(1).argmin()] = True  # a process without a backward pass would be waited for
        return moves


def divide(moves: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """The rows that train, and the others, where there are any."""
    parts = [(moves.nonzero().flatten(), True), ((~moves).nonzero().flatten(), False)]
    return [(rows, moving) for rows, moving in parts if len(rows)]


def is_multimodal(kwargs: dict[str, Any]) -> bool:
    """Whether more than ids goes into the model, by which rows cannot be told apart here."""
    return kwargs.get("num_images") is not None or any(isinstance(value, torch.Tensor) for value in kwargs.values())
