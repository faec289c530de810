"""
Where this package joins TRL: the one file that touches a private name of its trainer.

Each seam runs TRL's own method through `super()` and hands what it needs to a public hook. A subclass implements the
hooks and never sees TRL's internals; when TRL moves a seam, this file and its test say so.
"""

from typing import Any

import torch
from trl import GRPOTrainer

from ..objective.advantages import weighted_sum


class GRPOSeams(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with hooks before rewards and after advantages, doing nothing by themselves."""

    def before_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids: list[list[int]]
    ) -> None:
        """Called with the local completions of a generation batch before their rewards are computed."""

    def batch_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        """
        Advantages of the local completions.

        Args:
            batch (`dict`):
                TRL's generation batch, with TRL's own `advantages` of shape (B,).

        Returns:
            `torch.Tensor` of shape (B,) or (B, T).
        """
        return batch["advantages"]

    def weighted_rewards(self) -> torch.Tensor:
        """
        Weighted sum of the rewards of the last generation batch.

        Returns:
            `torch.Tensor` of shape (number of processes * B,), NaN where no reward function scored.
        """
        return weighted_sum(self._rewards_per_func, self.reward_weights)

    def train(self, *args, **kwargs):
        # Completions sampled in an earlier call came from an earlier policy.
        self._buffered_inputs = None
        return super().train(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.before_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        advantages = self.batch_advantages(batch)
        if advantages is batch["advantages"]:
            return batch
        self._replace_logged_advantages(advantages)
        return {**batch, "advantages": advantages}

    @property
    def text_tokenizer(self):
        """The tokenizer, also where the processing class is a multimodal processor."""
        return self._tokenizer

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def generations_per_prompt(self) -> int:
        return self.num_generations if self.mode == "train" else self.num_generations_eval

    def log_metric(self, name: str, value: float) -> None:
        """Add a value, equal on all processes, to the metric's mean at the next log."""
        self._metrics[self.mode][name].append(value)

    def reward_kwargs(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """What TRL passes to a reward function besides prompts and completions: data columns, state and loggers."""
        columns = [key for key in inputs[0] if key not in ("prompt", "completion", "completion_ids")]
        return {
            **{column: [example[column] for example in inputs] for column in columns},
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
        }

    def local_rows(self, num_rows: int) -> slice:
        """Where this process's `num_rows` rows lie among those gathered from all processes."""
        start = self.accelerator.process_index * num_rows
        return slice(start, start + num_rows)

    def _replace_logged_advantages(self, advantages: torch.Tensor) -> None:
        """Put our advantages in TRL's table of completions; token advantages by that of the first token."""
        ours = self.accelerator.gather(advantages if advantages.dim() == 1 else advantages[:, 0].contiguous()).tolist()
        logged = self._logs["advantages"]
        for _ in range(min(len(ours), len(logged))):
            logged.pop()
        logged.extend(ours)
