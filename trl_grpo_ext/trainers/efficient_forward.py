import logging
import math
from typing import Any

import torch
from trl.trainer.utils import split_tensor_dict

from ..batching import RowGroup, batched, cheapest_order, group_cost, length_groups, scatter_groups
from ..shared_prefix import (
    COARSE_ROUNDING,
    ROUNDING,
    SharedPrefix,
    cache_argument,
    computes_coarsely,
    has_dropout,
    number_prompts,
    recomputes_activations,
)
from .seams import GRPOSeams


logger = logging.getLogger(__name__)


class EfficientForward(GRPOSeams):
    """
    The same log probabilities for less work: without padding, with the prompt of a group computed once, and without a
    backward pass where it would give 0.
    """

    can_share_prompts: bool | None = None  # not tried yet

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if getattr(self.args, "regroup_microbatches", False):
            if self.reads_images:
                raise ValueError(
                    "`regroup_microbatches` is True, but the policy reads images, which do not move with their rows; "
                    "leave it out."
                )
            if self.aux_loss_enabled:
                raise ValueError(
                    "`regroup_microbatches` is True, but the router's loss is of a micro-batch; leave it out, or set "
                    "`router_aux_loss_coef` of the model's configuration to 0."
                )

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        saves_work = any(getattr(self.args, name, False) for name in ("efficient_microbatches", "skip_zero_advantage"))
        if saves_work and self.args.ddp_broadcast_buffers is None:
            # Each forward pass would wait for one of every other process, which may need fewer
            self.accelerator.ddp_handler.broadcast_buffers = False

    def arrange_microbatches(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not getattr(self.args, "regroup_microbatches", False):
            return batches
        # Neither number need be a multiple of the other, and rows stay within an optimizer step
        together = math.gcd(self.args.gradient_accumulation_steps, len(batches))
        return [batch for step in batched(batches, together) for batch in self._regrouped(step)]

    def _regrouped(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches of the same rows, so that those of similar length, or with one prompt, are together."""
        joined = {key: join_rows([batch[key] for batch in batches]) for key in batches[0]}
        input_ids = torch.cat([joined["prompt_ids"], joined["completion_ids"]], dim=1)
        attention_mask = torch.cat([joined["prompt_mask"], joined["completion_mask"]], dim=1)
        prompt_length, logits_to_keep = joined["prompt_ids"].shape[1], joined["completion_ids"].shape[1]
        shares = self._may_share_prompts(self.model)
        order = cheapest_order(
            attention_mask,
            logits_to_keep,
            self.positions_are_relative,
            self.may_forward_in_parts,
            len(input_ids) // len(batches),
            number_prompts(input_ids, attention_mask, prompt_length) if shares else None,
        )
        return split_tensor_dict({key: take_rows(value, order) for key, value in joined.items()}, len(batches))

    def logps_and_entropies(self, *args, **kwargs):
        if len(args) != 4 or is_multimodal(kwargs):
            return super().logps_and_entropies(*args, **kwargs)
        model, input_ids, attention_mask, logits_to_keep = args
        prompt_of = self._number_prompts(model, input_ids, attention_mask, logits_to_keep, kwargs)
        batch_size = kwargs.get("batch_size") or len(input_ids)
        if prompt_of is None or batch_size >= len(input_ids):
            return self._logps_by_group(model, input_ids, attention_mask, logits_to_keep, prompt_of, kwargs)
        # A group's rows are neighbours in what was sampled
        parts = [
            self._logps_by_group(model, input_ids[rows], attention_mask[rows], logits_to_keep, prompt_of[rows], kwargs)
            for rows in batched(list(range(len(input_ids))), batch_size)
        ]
        return tuple(None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True))

    def _logps_by_group(self, model, input_ids, attention_mask, logits_to_keep, prompt_of, kwargs):
        groups = self._row_groups(attention_mask, logits_to_keep, prompt_of)
        if not groups:
            return super().logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)
        results = []
        for group, has_gradient in groups:
            columns = slice(group.start, group.end)
            keep = logits_to_keep - (input_ids.shape[1] - group.end)
            shared = model if prompt_of is None else self._sharing(model, prompt_of[group.rows], group, keep)
            with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
                results.append(
                    super().logps_and_entropies(
                        shared, input_ids[group.rows, columns], attention_mask[group.rows, columns], keep, **kwargs
                    )
                )
        row_groups = [group for group, _ in groups]
        return tuple(
            None if values[0] is None else scatter_groups(list(values), row_groups, logits_to_keep)
            for values in zip(*results, strict=True)
        )

    def _row_groups(
        self, attention_mask: torch.Tensor, logits_to_keep: int, prompt_of: torch.Tensor | None
    ) -> list[tuple[RowGroup, bool]]:
        """Groups of rows to forward, and whether they have a gradient; none where all is forwarded as it is."""
        if not self._may_cut_batches:
            return []
        groups = [
            (RowGroup(rows[group.rows], group.start, group.end), moving)
            for rows, moving in divide(self._rows_that_train(attention_mask))
            for group in self._length_groups(
                attention_mask[rows], logits_to_keep, None if prompt_of is None else prompt_of[rows]
            )
        ]
        is_whole = len(groups) == 1 and groups[0][0].end - groups[0][0].start == attention_mask.shape[1]
        return [] if is_whole and prompt_of is None else groups

    @property
    def _may_cut_batches(self) -> bool:
        # The router's loss is of the whole batch, and the exact KL wants the hidden states of one forward pass.
        return not (self.aux_loss_enabled or self.needs_hidden_states or self.positions_depend_on_length)

    def _length_groups(
        self, attention_mask: torch.Tensor, logits_to_keep: int, prompt_of: torch.Tensor | None
    ) -> list[RowGroup]:
        if not getattr(self.args, "efficient_microbatches", False):
            return [RowGroup(torch.arange(len(attention_mask)), 0, attention_mask.shape[1])]
        trims_left, splits = self.positions_are_relative, self.may_forward_in_parts
        return length_groups(attention_mask, logits_to_keep, trims_left, splits, prompt_of)

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

    # Prompts

    def _number_prompts(self, model, input_ids, attention_mask, logits_to_keep, kwargs) -> torch.Tensor | None:
        """Which prompt each row has (B,), where these are to be computed once."""
        prompt_length = input_ids.shape[1] - logits_to_keep
        if not self._may_share_prompts(model) or prompt_length < 2:
            return None
        prompt_of = number_prompts(input_ids, attention_mask, prompt_length)
        numbers = prompt_of.cpu()
        shared, whole = (
            group_cost(len(input_ids), num_prompts, 0, prompt_length, input_ids.shape[1])
            for num_prompts in (len(numbers.unique()), len(input_ids))
        )
        if shared >= whole:
            return None
        if self.can_share_prompts is None:
            pair = (numbers == numbers.mode().values).nonzero().flatten()[:2]
            self.can_share_prompts = self._can_share(
                model, input_ids[pair], attention_mask[pair], logits_to_keep, prompt_of[pair], kwargs
            )
        return prompt_of if self.can_share_prompts else None

    def _may_share_prompts(self, model) -> bool:
        if not getattr(self.args, "efficient_microbatches", False) or self.can_share_prompts is False:
            return False
        if not self.may_forward_in_parts or not self._may_cut_batches:
            return False
        unwrapped = self.accelerator.unwrap_model(model)
        recomputes = torch.is_grad_enabled() and recomputes_activations(unwrapped)
        return not recomputes and not (model.training and has_dropout(unwrapped))

    def _can_share(self, model, input_ids, attention_mask, logits_to_keep, prompt_of, kwargs) -> bool:
        """Whether a model's log probabilities of two completions are the same with their prompt computed once."""
        group = RowGroup(torch.arange(2), 0, input_ids.shape[1])
        try:
            with torch.no_grad():
                ours, theirs = (
                    super(EfficientForward, self).logps_and_entropies(
                        caller, input_ids, attention_mask, logits_to_keep, **kwargs
                    )[0]
                    for caller in (self._sharing(model, prompt_of, group, logits_to_keep), model)
                )
        except Exception as error:  # whatever a model that has no such past raises
            logger.warning("The prompt of a group is computed for each completion: the model refused (%s).", error)
            return False
        mask = attention_mask[:, -logits_to_keep:].bool()
        difference = (ours - theirs)[mask].abs().mean().item()
        is_coarse = self.accelerator.mixed_precision != "no" or computes_coarsely(self.accelerator.unwrap_model(model))
        if difference <= (COARSE_ROUNDING if is_coarse else ROUNDING):
            return True
        logger.warning(
            "The prompt of a group is computed for each completion, as log probabilities differ by %.2g on average if "
            "it is computed once.",
            difference,
        )
        return False

    def _sharing(self, model, prompt_of: torch.Tensor, group: RowGroup, logits_to_keep: int):
        """The model, so that it computes the prompts of a group once, where rows have one in common."""
        if len(prompt_of.unique()) == len(prompt_of):
            return model
        base = self.accelerator.unwrap_model(model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        return SharedPrefix(model, prompt_of, group.end - group.start - logits_to_keep, cache_argument(base))


def divide(moves: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """The rows that train, and the others, where there are any."""
    parts = [(moves.nonzero().flatten(), True), ((~moves).nonzero().flatten(), False)]
    return [(rows, moving) for rows, moving in parts if len(rows)]


def join_rows(values: list[Any]) -> Any:
    """What several micro-batches hold under one key: of their rows, in tensors or lists, or of all of them."""
    if isinstance(values[0], list):
        return [value for rows in values for value in rows]
    return torch.cat(values) if isinstance(values[0], torch.Tensor) and values[0].dim() > 0 else values[0]


def take_rows(value: Any, order: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [value[row] for row in order.tolist()]
    has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
    return value[order.to(value.device)] if has_rows else value


def is_multimodal(kwargs: dict[str, Any]) -> bool:
    """Whether more than ids goes into the model, by which rows cannot be told apart here."""
    return kwargs.get("num_images") is not None or any(isinstance(value, torch.Tensor) for value in kwargs.values())
