"""Algorithm 1's last line: the reward model goes on learning, from the policy's own samples and some of history."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import PrinterCallback, Trainer
from trl import RewardConfig, RewardTrainer

from ..model_card import write_reward_model_card
from ..prm.formats import is_head
from ..prm.metrics import step_metrics
from ..prm.process_reward_model import ProcessRewardModel, write_settings
from ..trainers.prm_config import PRMConfig
from ..trainers.prm_trainer import PRMTrainer
from .outcome_reward_model import OutcomeRewardModel
from .quality import pair_metrics
from .replay import preference_pairs, question_key
from .rollouts import Rollout
from .shared_base import SharedBaseScorer


OPTIMIZER_FILE = "reward_model_optimizer.safetensors"
# A reward model learns within the policy's training: nothing is logged, saved or shuffled but what its trainer must.
INNER = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "remove_unused_columns": False,
}


class RewardUpdate(ABC):
    """
    A reward model with the optimizer that it keeps over all iterations.

    Args:
        model ([`OutcomeRewardModel`] or [`~trl_grpo_ext.ProcessRewardModel`]):
            What scores, and is trained.
        learning_rate (`float`):
            Constant over all updates.
        head_learning_rate (`float`, *optional*):
            That of a head that is new. By default `learning_rate`.

    Raises:
        `ValueError`: if nothing of the model is trainable.
    """

    kind: str

    def __init__(self, model: Any, learning_rate: float, head_learning_rate: float | None = None):
        self.model = model
        with trainable(model.model):
            parameters = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError(
                "`reward_model` has no parameter that requires a gradient, but is to be trained along; load it "
                "trainable (adapters with `is_trainable=True`), or use reward_update='none'."
            )
        head = [p for name, p in parameters.items() if is_head(name)]
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in parameters.items() if not is_head(name)]},
            {"params": head, "lr": head_learning_rate or learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0)

    @abstractmethod
    def examples(self, rollouts: Sequence[Rollout], rng: random.Random) -> list[dict[str, Any]]:
        """What the rollouts of some questions teach."""

    @abstractmethod
    def quality(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """How good the model is on rollouts that it was not trained on."""

    @abstractmethod
    def make_trainer(self, dataset: Dataset, options: dict[str, Any]) -> Trainer:
        """A trainer of the model, with its optimizer."""

    def train(self, examples: list[dict[str, Any]], options: dict[str, Any]) -> None:
        """
        Train the model further.

        Args:
            examples (`list[dict]`):
                Rows, the same on all processes.
            options (`dict`):
                [`~transformers.TrainingArguments`] of the update: batch size, epochs, precision and so on.
        """
        with own_randomness(), trainable(self.model.model):
            trainer = self.make_trainer(Dataset.from_list(examples), {**INNER, **options})
            trainer.pop_callback(PrinterCallback)
            trainer.train()
        # What accelerate wrapped around the forward pass would be wrapped again by the next update
        trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
        self.optimizer.zero_grad()
        self.model.model.eval()

    def save_model(self, folder: Path) -> None:
        """Write model, tokenizer and model card."""
        self.model.model.save_pretrained(folder)
        self.model.tokenizer.save_pretrained(folder)
        write_reward_model_card(folder, self.kind, type(self.model).__name__)

    def save(self, folder: Path) -> None:
        """Write model, tokenizer and optimizer."""
        self.save_model(folder)
        tensors = {
            f"{index}.{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Read what [`save`] wrote, into the live model."""
        load_weights(self.model.model, folder)
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in load_file(folder / OPTIMIZER_FILE).items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


class OutcomeUpdate(RewardUpdate):
    """Bradley-Terry, by TRL's [`~trl.RewardTrainer`], on pairs of a right and a wrong output of one question."""

    kind = "outcome"

    def examples(self, rollouts: Sequence[Rollout], rng: random.Random) -> list[dict[str, Any]]:
        pairs = [
            {
                "chosen_ids": self.model.encode(right.prompt, right.completion_message),
                "rejected_ids": self.model.encode(wrong.prompt, wrong.completion_message),
            }
            for right, wrong in preference_pairs(rollouts, rng)
        ]
        longest = self.model.max_length
        return [pair for pair in pairs if longest is None or max(map(len, pair.values())) <= longest]

    def quality(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        scores = self.model([r.prompt for r in rollouts], [r.completion_message for r in rollouts])
        return pair_metrics(scores, [r.verified for r in rollouts], [question_key(r.prompt) for r in rollouts])

    def make_trainer(self, dataset: Dataset, options: dict[str, Any]) -> Trainer:
        args = RewardConfig(**options, max_length=self.model.max_length)
        return RewardTrainer(
            self.model.model,
            args=args,
            train_dataset=dataset,
            processing_class=self.model.tokenizer,
            optimizers=(self.optimizer, None),
        )


class ProcessUpdate(RewardUpdate):
    """Step labels, by [`~trl_grpo_ext.PRMTrainer`]: those of a rule, or made by sampling as in Math-Shepherd."""

    kind = "process"

    def examples(self, rollouts: Sequence[Rollout], rng: random.Random) -> list[dict[str, Any]]:
        return [
            {"prompt": r.prompt, "completions": r.steps, "labels": r.step_labels}
            for r in rollouts
            if any(label is not None for label in r.step_labels)
        ]

    def quality(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        labelled = [r for r in rollouts if any(label is not None for label in r.step_labels)]
        if not labelled:
            return {"accuracy": float("nan")}
        scores = self.model.score([r.prompt for r in labelled], [r.steps for r in labelled])
        pairs = [
            [
                (score, label)
                for score, label in zip(row, rollout.step_labels, strict=True)
                if score is not None and label is not None
            ]
            for row, rollout in zip(scores, labelled, strict=True)
        ]
        pairs = [row for row in pairs if row]
        metrics = step_metrics([[s for s, _ in row] for row in pairs], [[label for _, label in row] for row in pairs])
        names = ("accuracy", "base_rate", "first_error_f1", "calibration_error")
        last = [self.model.reduce(row) for row in scores]
        verdicts = pair_metrics(last, [r.verified for r in labelled], [question_key(r.prompt) for r in labelled])
        return {**{name: metrics[name] for name in names}, "agreement": verdicts["agreement"]}

    def make_trainer(self, dataset: Dataset, options: dict[str, Any]) -> Trainer:
        args = PRMConfig(
            **options,
            max_length=self.model.max_length,
            max_completion_length=self.model.max_completion_length,
            step_separator=self.model.format.separator,
        )
        return PRMTrainer(
            self.model.model,
            args=args,
            train_dataset=dataset,
            processing_class=self.model.tokenizer,
            optimizers=(self.optimizer, None),
        )

    def save_model(self, folder: Path) -> None:
        super().save_model(folder)
        write_settings(
            folder,
            step_separator=self.model.format.separator,
            max_length=self.model.max_length,
            max_completion_length=self.model.max_completion_length,
        )


UPDATES: dict[str, tuple[type, type[RewardUpdate]]] = {
    "outcome": (OutcomeRewardModel, OutcomeUpdate),
    "process": (ProcessRewardModel, ProcessUpdate),
}


def trainable(model: Any) -> AbstractContextManager:
    """Within it a reward model can be trained; one on a shared base is active there for long enough."""
    return model.active() if isinstance(model, SharedBaseScorer) else nullcontext()


@contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the caller's random state as it was: a trainer sets all seeds when it is made."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def load_weights(model: Any, folder: Path) -> None:
    """Set a live model's weights, or a PEFT model's adapter, to those saved in a folder."""
    if isinstance(model, SharedBaseScorer):
        model.load_saved(folder)
        return
    if is_peft_model(model):
        from peft import set_peft_model_state_dict
        from peft.utils import SAFETENSORS_WEIGHTS_NAME

        set_peft_model_state_dict(model, load_file(folder / SAFETENSORS_WEIGHTS_NAME))
        return
    for file in sorted(folder.glob("model*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)  # tied weights are saved once
