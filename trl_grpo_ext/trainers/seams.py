"""
Where this package joins TRL: the one file that touches a private name of its trainer.

Each seam runs TRL's own method through `super()` and hands what it needs to a public hook. A subclass implements the
hooks and never sees TRL's internals; when TRL moves a seam, this file and its test say so.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..objective.advantages import weighted_sum
from ..objective.loss import GLOBAL_TOKEN_LOSSES, local_normalizer


@dataclass(frozen=True)
class LMHead:
    """
    The projection from last hidden states to logits, as TRL's fused LM head has it.

    Args:
        weight (`torch.Tensor` of shape (V, H)), bias (`torch.Tensor` of shape (V,), *optional*):
            Those of the model's output embeddings.
        temperature (`float`):
            Sampling temperature that logits are divided by.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
        return logits / self.temperature


class GRPOSeams(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with hooks around rewards, advantages and loss, doing nothing by themselves."""

    beta: float
    kl_coefficient: float  # beta, where TRL must take it for 0
    extends_loss = False
    replaces_kl = False
    needs_hidden_states = False
    pools_generation_batches = False
    _generation_batches: list = []
    _generated: list[dict[str, Any]] = []
    _buffered_inputs: list[dict[str, Any]] | None = None
    _loss_inputs: dict[str, Any] | None = None
    _policy_logps: torch.Tensor
    last_hidden_states: torch.Tensor  # (B, T, H), before each completion token, of the last forward pass
    last_head: LMHead
    reference_head: LMHead

    # Rewards and advantages

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

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        # Completions sampled in an earlier call, which may have been interrupted, came from an earlier policy.
        self.drop_buffered_completions()
        self._step = 0  # at which TRL samples
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(Path(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def drop_buffered_completions(self) -> None:
        """Have the next optimizer step sample anew, whatever is left of the last generation batch."""
        self._buffered_inputs = None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.before_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func

    def get_batch_samples(self, *args, **kwargs):
        samples, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        # TRL's loader repeats a generation batch for each micro-batch that is made of it
        self._generation_batches = samples[:: self.args.steps_per_generation * self.num_iterations]
        self._generated = []
        return samples, num_items_in_batch

    def pool_batches(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Called with the generation batches that an optimizer step is made of, before their losses.

        Args:
            batches (`list[dict]`):
                TRL's generation batches: one, or where `pools_generation_batches` all of the step.

        Returns:
            The batches to train on. By default each has the mean number of tokens, by which TRL's loss divides.
        """
        mean_tokens = torch.stack([batch["num_items_in_batch"] for batch in batches]).float().mean()
        return [{**batch, "num_items_in_batch": mean_tokens} for batch in batches] if len(batches) > 1 else batches

    def arrange_microbatches(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Called with the micro-batches, shuffled, that a generation batch is cut into; returns those to train on."""
        return batches

    def _prepare_inputs(self, generation_batch):
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        batches = self._buffered_inputs
        if batches is None or batches is buffered:
            return inputs
        place = next(place for place, batch in enumerate(batches) if batch is inputs)
        self._buffered_inputs = self.arrange_microbatches(batches)
        return self._buffered_inputs[place]

    def _generate_and_score_completions(self, inputs):
        is_split = self.pools_generation_batches and len(self._generation_batches) > 1
        if not is_split or self.mode == "eval":
            return self.pool_batches([self.sample_batch(inputs)])[0]
        if not self._generated:
            # All at once, so that the denominators of the step are known from its first loss on
            self._generated = self.pool_batches([self.sample_batch(batch) for batch in self._generation_batches])
        return self._generated.pop(0)

    def sample_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Sample and score completions.

        Args:
            inputs (`list[dict]` of length B):
                Rows of the data set, each once for each of its completions on this process.

        Returns:
            `dict`: TRL's generation batch, with the advantages of [`batch_advantages`].
        """
        batch = super()._generate_and_score_completions(inputs)
        if self.needs_hidden_states:
            # The reference's forward pass is the last one that TRL makes here.
            batch = {**batch, "ref_hidden_states": self.last_hidden_states}
            self.reference_head = self.last_head
        advantages = self.batch_advantages(batch)
        if advantages is batch["advantages"]:
            return batch
        self._replace_logged_advantages(advantages)
        return {**batch, "advantages": advantages}

    # Loss

    def before_loss(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """
        Called in each loss computation, once the policy's log probabilities are there.

        Args:
            inputs (`dict`):
                Inputs of TRL's loss, a copy that may be changed: TRL reads its `advantages` and `old_per_token_logps`
                after this. Where `replaces_kl`, `beta` is 0 here and `kl_coefficient` what it was.
            logps (`torch.Tensor` of shape (B, T)):
                Log probabilities of the completions under the policy.
        """

    def after_loss(self, loss: torch.Tensor, inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
        """Called with TRL's loss, without its KL where `replaces_kl`; returns the loss to train on."""
        return loss

    def _compute_loss(self, model, inputs):
        self._loss_inputs = dict(inputs)
        try:
            if not self.extends_loss:
                return super()._compute_loss(model, self._loss_inputs)
            with self._without_kl() if self.replaces_kl else nullcontext():
                loss = super()._compute_loss(model, self._loss_inputs)
            return self.after_loss(loss, self._loss_inputs, self._policy_logps)
        finally:
            self._loss_inputs = None
            for tensor in ("_policy_logps", "last_hidden_states"):  # they would keep the graph
                self.__dict__.pop(tensor, None)

    def logps_and_entropies(self, *args, **kwargs) -> tuple[Any, ...]:
        """TRL's forward pass: log probabilities (B, T) of completions, and what else TRL returns with them."""
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if not self.extends_loss:
            return self.logps_and_entropies(model, *args, **kwargs)
        with self._recorded_hidden_states(model) as states:
            result = self.logps_and_entropies(model, *args, **kwargs)
        logps = result[0]
        if states:
            # The state before each completion token
            self.last_hidden_states = torch.cat(states)[:, -logps.shape[1] - 1 : -1]
        if self._loss_inputs is not None:
            self._policy_logps = logps
            self.before_loss(self._loss_inputs, logps)
        return result

    @contextmanager
    def _without_kl(self) -> Iterator[None]:
        self.kl_coefficient, self.beta = self.beta, 0.0
        try:
            yield
        finally:
            self.beta = self.kl_coefficient

    @contextmanager
    def _recorded_hidden_states(self, model) -> Iterator[list[torch.Tensor]]:
        """Collect the last hidden states of each forward pass, where they are needed, and remember the LM head."""
        states: list[torch.Tensor] = []
        if not self.needs_hidden_states:
            yield states
            return
        model = self.accelerator.unwrap_model(model)
        base = model.get_base_model() if is_peft_model(model) else model
        hook = base.base_model.register_forward_hook(lambda _, __, output: states.append(output.last_hidden_state))
        try:
            yield states
        finally:
            hook.remove()
        head = base.get_output_embeddings()
        self.last_head = LMHead(head.weight, getattr(head, "bias", None), self.temperature)

    def loss_normalizer(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | float:
        """What TRL divides the sum over the completions (or tokens) of this micro-batch by."""
        is_training = self.mode == "train"
        accumulation = self.current_gradient_accumulation_steps if is_training else 1
        if self.loss_type in GLOBAL_TOKEN_LOSSES:
            # spans the generation batch, while a loss is for one accumulation window
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            return tokens * accumulation / self.args.steps_per_generation if is_training else tokens
        return local_normalizer(mask, self.loss_type, self.max_completion_length) * accumulation

    # State

    def save_checkpoint_state(self, checkpoint: Path) -> None:
        """Called on all processes with the folder of a checkpoint, before TRL writes its own."""

    def load_checkpoint_state(self, checkpoint: Path) -> None:
        """Called on a resume with the folder of the checkpoint, after TRL has loaded its own."""

    def _save_checkpoint(self, model, trial):
        # First, so that no complete checkpoint lacks it
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.save_checkpoint_state(folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.load_checkpoint_state(Path(checkpoint))

    # What hooks may use

    def sample_continuations(self, prefixes: list[list[int]]) -> list[list[int]]:
        """
        Continue ids with the policy, by the trainer's own generation (vLLM included) and sampling parameters.

        Args:
            prefixes (`list[list[int]]`):
                Ids of prompts, or of prompts and beginnings of completions.

        Returns:
            `list[list[int]]`: the ids of one continuation each.
        """
        return self._generate_single_turn(prefixes, None, {}, num_generations=1)[0]

    @torch.no_grad()
    def completion_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """Log probabilities (B, T) of the completions of a generation batch under the policy as it is."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        rows = self.args.per_device_train_batch_size
        length = batch["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(self.model, input_ids, attention_mask, length, batch_size=rows)[
            0
        ]

    @property
    def text_tokenizer(self):
        """The tokenizer, also where the processing class is a multimodal processor."""
        return self._tokenizer

    @property
    def reads_images(self) -> bool:
        """Whether the policy is a multimodal model."""
        return self._is_vlm

    @property
    def trains_without_advantage(self) -> bool:
        """Whether a completion of advantage 0 has a gradient: of the KL, the entropy bonus or the router's loss."""
        return self.args.beta != 0 or self._entropy_bonus_enabled or self.aux_loss_enabled

    @property
    def positions_are_relative(self) -> bool:
        """Whether a model computes the same of tokens that are all moved by some places, as with rotary positions."""
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        return getattr(config, "rope_parameters", None) is not None

    @property
    def positions_depend_on_length(self) -> bool:
        """Whether a model's rotary positions are scaled by the length of the batch."""
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        kinds = str(getattr(config, "rope_parameters", None))
        return "'dynamic'" in kinds or "'longrope'" in kinds

    @property
    def may_forward_in_parts(self) -> bool:
        """Whether a loss may come of several forward passes, of other numbers on other processes."""
        checkpointing = self.args.gradient_checkpointing_kwargs or {}
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if is_sharded or checkpointing.get("use_reentrant", False) or self.args.ddp_static_graph:
            return False
        if self.accelerator.num_processes == 1:
            return True
        # DDP broadcasts buffers before each pass, and looks in the last one alone for parameters that go unused
        return not (self.accelerator.ddp_handler.broadcast_buffers or self.args.ddp_find_unused_parameters)

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


def last_complete_checkpoint(output_dir: Path) -> str | None:
    """The newest checkpoint that was written to its end, which a kill may have kept the newest one from."""
    steps = [
        (int(folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")), folder)
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdecimal()
    ]
    return next((str(folder) for _, folder in sorted(steps, reverse=True) if is_complete(folder)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether the file that is written last, and before older checkpoints are deleted, is whole."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True
