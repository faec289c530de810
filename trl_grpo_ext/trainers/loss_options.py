import json
from pathlib import Path
from typing import Any

import torch

from ..objective.kl import adapted_coefficient, credit_kl, exact_kl, kl_divergence, kl_penalty
from ..objective.loss import (
    GLOBAL_TOKEN_LOSSES,
    aggregate,
    bounded_old_logps,
    gspo_token_old_logps,
    importance_ratio,
    token_weights,
)
from .efficient_forward import EfficientForward
from .grpo_config import GRPOExtConfig


KL_STATE_FILE = "kl_coefficient.json"
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)


class LossOptions(EfficientForward):
    """
    The options of [`GRPOExtConfig`] that act between the policy's forward pass and its loss.

    TRL computes the policy term. Its KL is left out where ours differs, and ours is added with TRL's normalizer.
    """

    args: GRPOExtConfig
    _uses_gspo_token = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, GRPOExtConfig):
            return
        self.replaces_kl = self.args.changes_kl
        self.needs_hidden_states = self.args.kl_estimator == "exact"
        if self.needs_hidden_states:
            self._check_exact_kl()
        if self.args.importance_sampling_level == "sequence_token":
            # For TRL it is the token level, with other old log probabilities.
            self.importance_sampling_level = "token"
            self._uses_gspo_token = True
        self.extends_loss = self.replaces_kl or self._uses_gspo_token or self.args.log_gradient_coefficient
        steps_per_rollout = self.args.steps_per_generation * self.num_iterations
        has_global_denominator = self.args.live_group_denominator or self.loss_type in GLOBAL_TOKEN_LOSSES
        self.pools_generation_batches = (
            self.args.pool_generation_batches
            and has_global_denominator
            and self.args.gradient_accumulation_steps % steps_per_rollout == 0
        )
        self._coefficient_window: list[torch.Tensor] = []
        self._kl_window = torch.zeros(2, device=self.accelerator.device)

    def before_loss(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        mask = own_tokens(inputs)
        if self.needs_hidden_states:
            inputs["exact_kl"] = self._exact_kl(inputs, mask)
        if self.replaces_kl and self.args.kl_placement != "loss":
            penalty = credit_kl(self._sampled_kl(inputs, logps), mask, self.args.kl_credit)
            advantages = inputs["advantages"]
            advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
            inputs["advantages"] = advantages - self.kl_coefficient * penalty
        changes_ratio = self.replaces_kl or self._uses_gspo_token
        if changes_ratio and inputs.get("old_per_token_logps") is not None:
            old_logps = inputs["old_per_token_logps"]
            if self._uses_gspo_token:
                old_logps = gspo_token_old_logps(logps, old_logps, mask)
            inputs["old_per_token_logps"] = bounded_old_logps(logps, old_logps, mask)

    def after_loss(self, loss: torch.Tensor, inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
        mask = own_tokens(inputs)
        normalizer = self.loss_normalizer(inputs, mask)
        if self.replaces_kl:
            kl = self._kl(inputs, logps)
            if self.args.kl_placement != "reward":
                loss = loss + self.beta * aggregate(kl, mask, self.loss_type, normalizer=normalizer)
            self._log_kl(kl.detach(), inputs["ref_per_token_logps"], logps.detach(), mask)
        if self.args.log_gradient_coefficient and self.mode == "train":
            weights = token_weights(mask, self.loss_type, normalizer)
            self._log_gradient_coefficient(loss, logps, mask, weights)
        return loss

    def save_checkpoint_state(self, checkpoint: Path) -> None:
        super().save_checkpoint_state(checkpoint)
        if self.args.should_save and self.replaces_kl and self.args.kl_target is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / KL_STATE_FILE).write_text(json.dumps({"beta": self.beta}))

    def load_checkpoint_state(self, checkpoint: Path) -> None:
        super().load_checkpoint_state(checkpoint)
        file = checkpoint / KL_STATE_FILE
        if self.replaces_kl and self.args.kl_target is not None and file.exists():
            self.beta = json.loads(file.read_text())["beta"]

    def _kl(self, inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
        """Divergence at each token (B, T), with the gradient it has in the loss."""
        if self.args.kl_estimator == "exact":
            return inputs["exact_kl"]
        mask = own_tokens(inputs)
        old_logps = inputs.get("old_per_token_logps")
        level = self.importance_sampling_level
        ratio = importance_ratio(logps, logps.detach() if old_logps is None else old_logps, mask, level)
        return kl_penalty(
            logps, inputs["ref_per_token_logps"], self.args.kl_estimator, self.args.resolved_kl_gradient, ratio
        )

    def _sampled_kl(self, inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
        """Divergence of the sampling policy at each token (B, T), as a part of the reward: a number."""
        if self.args.kl_estimator == "exact":
            return inputs["exact_kl"].detach()  # the policy is the one that sampled, or the config refuses it
        old_logps = inputs.get("old_per_token_logps")
        sampling_logps = logps.detach() if old_logps is None else old_logps
        return kl_divergence(sampling_logps, inputs["ref_per_token_logps"], self.args.kl_estimator)

    def _exact_kl(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        own = mask.bool()
        kl = exact_kl(
            self.last_hidden_states[own], inputs["ref_hidden_states"][own], self.last_head, self.reference_head
        )
        return kl.new_zeros(mask.shape).masked_scatter(own, kl)

    def _log_kl(self, kl: torch.Tensor, ref_logps: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor) -> None:
        gap = kl_divergence(logps, ref_logps, "abs").where(mask.bool(), 0)
        sums = torch.stack([kl.where(mask.bool(), 0).sum(), gap.sum(), mask.sum().float()])
        kl_sum, gap_sum, num_tokens = self.accelerator.reduce(sums, reduction="sum")
        self.log_metric("kl", (kl_sum / num_tokens.clamp(min=1)).item())
        self.log_metric("kl/abs", (gap_sum / num_tokens.clamp(min=1)).item())
        largest = gap.max() if gap.numel() else gap.new_zeros(())
        self.log_metric("kl/max_log_ratio", self.accelerator.gather(largest).max().item())
        if self.args.kl_target is not None and self.args.kl_horizon is not None and self.mode == "train":
            self._adapt_coefficient(kl_sum, num_tokens, self.args.kl_target, self.args.kl_horizon)

    def _adapt_coefficient(
        self, kl_sum: torch.Tensor, num_tokens: torch.Tensor, target: float, horizon: float
    ) -> None:
        """Once an optimizer step, so that all of its micro-batches have one coefficient."""
        self._kl_window += torch.stack([kl_sum, num_tokens])
        if not self.accelerator.sync_gradients:
            return
        kl_sum, num_tokens = self._kl_window
        self._kl_window = torch.zeros_like(self._kl_window)
        completions = (
            self.args.per_device_train_batch_size
            * self.current_gradient_accumulation_steps
            * self.accelerator.num_processes
        )
        self.log_metric("kl_coefficient", self.beta)
        kl = (kl_sum / num_tokens.clamp(min=1)).item()
        self.beta = adapted_coefficient(self.beta, kl, target, horizon, completions)

    def _log_gradient_coefficient(
        self, loss: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Log mean and std, over the tokens of an optimizer step, of what multiplies grad log pi (Eq. 5)."""
        (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
        coefficients = (-gradient / weights)[mask.bool()].float()
        count = coefficients.new_tensor(len(coefficients))
        self._coefficient_window.append(torch.stack([count, coefficients.sum(), coefficients.square().sum()]))
        if not self.accelerator.sync_gradients:
            return
        count, total, squares = self.accelerator.reduce(torch.stack(self._coefficient_window).sum(0), reduction="sum")
        self._coefficient_window = []
        mean = total / count.clamp(min=1)
        variance = squares / count.clamp(min=1) - mean.square()
        self.log_metric("gradient_coefficient/mean", mean.item())
        self.log_metric("gradient_coefficient/std", variance.clamp(min=0).sqrt().item())

    def _check_exact_kl(self) -> None:
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        transforms = [name for name in LOGIT_TRANSFORMS if getattr(config, name, None) not in (None, 1.0)]
        if transforms:
            raise ValueError(
                f"`kl_estimator` is 'exact', which does not know the model's `{transforms[0]}`; use 'k3'."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "`kl_estimator` is 'exact', which needs the whole LM head on each device and so neither FSDP nor "
                "DeepSpeed; use 'k3', or DDP."
            )


def own_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """1 at the tokens that the policy wrote itself, (B, T): no padding, none of tools or environments."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)
