import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import logging
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl.trainer.utils import disable_dropout_in_model, get_config_model_id, pad

from ..model_card import describe_prm_training
from ..prm.formats import HEADS, TokenClassificationFormat, is_head, keep_head
from ..prm.metrics import step_metrics
from ..prm.process_reward_model import write_settings
from .prm_config import PRMConfig
from .pushing import PushesSafely


logger = logging.get_logger(__name__)

IGNORED = -100.0


class PRMTrainer(PushesSafely):
    """
    Trainer of process reward models: a token classifier that says of each step, at its separator, whether it is right.

    It takes over from the PRMTrainer that TRL had up to 1.13, with the same rows and names. Labels may be soft: then
    the loss is the binary cross-entropy with them, which for hard ones is the cross-entropy of the two classes. A loss
    is the mean over all labelled steps of an optimizer step, however these are cut into micro-batches and processes.

    Example:

    ```python
    trainer = PRMTrainer("Qwen/Qwen2.5-0.5B", args=PRMConfig("prm"), train_dataset=dataset)
    trainer.train()
    trainer.save_model("prm")
    prm = ProcessRewardModel("prm")  # reads what it was trained to read
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            A Hub id or folder, loaded with two classes, or a loaded token classifier of two classes.
        args ([`PRMConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset ([`~datasets.Dataset`], *optional*):
            Columns `prompt` (plain or conversational), `completions` (the steps) and `labels` (one a step: a bool, or
            a number in 0 to 1; `None` for a step that is not to train).
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The tokenizer; by default loaded from `model`.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Train adapters. The classification head is trained and saved with them.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Load the model quantized (QLoRA), its head excepted.
        **trainer_kwargs:
            Those of [`~transformers.Trainer`]: `callbacks`, `optimizers` and so on.

    Raises:
        `ValueError`: if a data set is empty or lacks a column, completions and labels differ in number, a label is
            outside 0 to 1, no step is within the lengths, or the model has no head or other than two classes.
        `TypeError`: if a data set is no [`~datasets.Dataset`], or steps or labels are of another type.
    """

    _tag_names = ["trl_grpo_ext", "prm"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: PRMConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        **trainer_kwargs,
    ):
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = args or PRMConfig(f"{Path(name).name}-PRM")
        if isinstance(model, str):
            model = load_classifier(model, args, quantization_config)
        check_two_classes(model)
        tokenizer = processing_class or AutoTokenizer.from_pretrained(name)
        if peft_config is not None:
            model = add_adapters(model, peft_config, args)
        if args.disable_dropout:
            disable_dropout_in_model(model)
        prepare = self._prepare = partial(prepare_dataset, tokenizer=tokenizer, args=args)
        pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        super().__init__(
            model=model,
            args=args,
            data_collator=trainer_kwargs.pop("data_collator", None) or partial(collate, pad_token_id=pad_token_id),
            train_dataset=None
            if train_dataset is None
            else prepare(train_dataset, name="train_dataset", last_only=args.train_on_last_step_only),
            eval_dataset=map_datasets(eval_dataset, prepare),
            processing_class=tokenizer,
            compute_loss_func=step_loss,
            compute_metrics=trainer_kwargs.pop("compute_metrics", None) or compute_step_metrics,
            preprocess_logits_for_metrics=trainer_kwargs.pop("preprocess_logits_for_metrics", None) or to_scores,
            **trainer_kwargs,
        )

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.args.head_learning_rate is not None:
            heads = {parameter for name, parameter in self.model.named_parameters() if is_head(name)}
            for group in list(optimizer.param_groups):
                head = [parameter for parameter in group["params"] if parameter in heads]
                if head:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in heads]
                    optimizer.add_param_group({**group, "params": head, "lr": self.args.head_learning_rate})
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            # Also where a checkpoint is pushed from
            for folder in {Path(output_dir or self.args.output_dir), Path(self.args.output_dir)}:
                write_settings(
                    folder,
                    step_separator=self.args.step_separator,
                    max_length=self.args.max_length,
                    max_completion_length=self.args.max_completion_length,
                )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return super().get_eval_dataloader(self._prepared(eval_dataset))

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        return super().get_test_dataloader(self._prepared(test_dataset))

    def _prepared(self, dataset: Any) -> Any:
        """A data set that `evaluate` or `predict` is given, tokenized if it is not."""
        is_raw = isinstance(dataset, Dataset) and "completions" in dataset.column_names
        return self._prepare(dataset, name="dataset") if is_raw else dataset

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None, **kwargs
    ) -> None:
        base_model = get_config_model_id(self.model.config)
        tags = [*self._tag_names, *([tags] if isinstance(tags, str) else tags or [])]
        kwargs = {"finetuned_from": base_model or None, "dataset": dataset_name, **kwargs}
        super().create_model_card(model_name=model_name, tags=tags, **kwargs)
        if self.is_world_process_zero():
            describe_prm_training(Path(self.args.output_dir, "README.md"), base_model, tags, self.args)


def load_classifier(name_or_path: str, args: PRMConfig, quantization_config: Any) -> PreTrainedModel:
    init_kwargs = args.model_init_kwargs or {}
    kwargs = dict(json.loads(init_kwargs) if isinstance(init_kwargs, str) else init_kwargs)
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    return AutoModelForTokenClassification.from_pretrained(name_or_path, num_labels=2, **keep_head(kwargs))


def check_two_classes(model: PreTrainedModel) -> None:
    if not any(hasattr(module, head) for module in model.modules() for head in HEADS):
        raise ValueError(
            f"`model` is a {type(model).__name__}, which has no classification head; load it as a token classifier, "
            "or pass its name."
        )
    if model.config.num_labels != 2:
        raise ValueError(
            f"`model` has {model.config.num_labels} classes, but a step is either wrong or right; load it with "
            "`num_labels=2`."
        )


def add_adapters(model: PreTrainedModel, peft_config: Any, args: PRMConfig) -> nn.Module:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.gradient_checkpointing)
    head = next(name for name in HEADS if hasattr(model, name))
    peft_config = copy.copy(peft_config)
    peft_config.task_type = "TOKEN_CLS"
    peft_config.modules_to_save = sorted({*(peft_config.modules_to_save or []), head})
    return get_peft_model(model, peft_config)


def map_datasets(datasets: Dataset | dict[str, Dataset] | None, prepare: Callable) -> Any:
    if isinstance(datasets, dict):
        return {name: prepare(dataset, name=f"eval_dataset[{name!r}]") for name, dataset in datasets.items()}
    return None if datasets is None else prepare(datasets, name="eval_dataset")


def prepare_dataset(
    dataset: Dataset, *, name: str, tokenizer: PreTrainedTokenizerBase, args: PRMConfig, last_only: bool = False
) -> Dataset:
    """Rows of `input_ids` and one label a token, [`IGNORED`] wherever no step ends; tokenized rows as they are."""
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`{name}` is a {type(dataset).__name__}, but must be a `datasets.Dataset`.")
    if {"input_ids", "labels"} <= set(dataset.column_names) and "completions" not in dataset.column_names:
        return dataset
    missing = {"prompt", "completions", "labels"} - set(dataset.column_names)
    if missing or len(dataset) == 0:
        lacks = f"has no column {', '.join(map(repr, sorted(missing)))}" if missing else "has no rows"
        raise ValueError(f"`{name}` {lacks}; give rows of `prompt`, `completions` (the steps) and `labels`.")
    # `map` would cast new labels to the type of old ones, and booleans cannot say "ignored"
    columns = {column: dataset[column] for column in ("prompt", "completions", "labels")}
    rows = [
        label_tokens(index, prompt, steps, labels, tokenizer, args, last_only)
        for index, (prompt, steps, labels) in enumerate(zip(*columns.values(), strict=True))
    ]
    kept = [row for row in rows if any(label != IGNORED for label in row["labels"])]
    if not kept:
        raise ValueError(
            f"`{name}` has no labelled step within `max_length` ({args.max_length}) and `max_completion_length` "
            f"({args.max_completion_length}); raise them, or check the labels."
        )
    if len(kept) < len(rows):
        logger.warning(f"{len(rows) - len(kept)} of {len(rows)} rows of `{name}` have no labelled step to train on.")
    return Dataset.from_list(kept)


def label_tokens(
    index: int,
    prompt: str | list,
    steps: list[str],
    labels: list,
    tokenizer: PreTrainedTokenizerBase,
    args: PRMConfig,
    last_only: bool,
) -> dict[str, list]:
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise TypeError(f"Row {index} has the `completions` {steps!r}; give a list of step texts.")
    if not isinstance(labels, list) or not all(label is None or isinstance(label, (int, float)) for label in labels):
        raise TypeError(f"Row {index} has the `labels` {labels!r}; give a list with a bool or number a step.")
    if len(steps) != len(labels):
        raise ValueError(f"Row {index} has {len(labels)} `labels` for {len(steps)} `completions`; give one a step.")
    for label in labels:
        if label is not None and not 0 <= label <= 1:
            raise ValueError(f"Row {index} has the label {label!r}; a label is a bool, or a number in 0 to 1.")
    encoded = TokenClassificationFormat(args.step_separator).encode(tokenizer, prompt, steps)
    encoded = encoded.truncated(args.max_length, args.max_completion_length)
    token_labels = [IGNORED] * len(encoded.ids)
    for step, position in enumerate(encoded.positions):
        is_trained = not last_only or step == len(steps) - 1
        if labels[step] is not None and is_trained:
            token_labels[position] = float(labels[step])
    return {"input_ids": encoded.ids, "labels": token_labels}


def collate(rows: list[dict[str, list]], pad_token_id: int) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad(ids, padding_value=pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in ids], padding_value=0),
        "labels": pad([torch.tensor(row["labels"]) for row in rows], padding_value=IGNORED),
    }


def right_logits(logits: torch.Tensor) -> torch.Tensor:
    """Log-odds that a step is right, (..., 2) to (...): the softmax of two classes is the sigmoid of a difference."""
    return logits[..., 1].float() - logits[..., 0].float()


def to_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Probability that a step is right at each token, which is all that metrics need of the logits."""
    return right_logits(logits).sigmoid()


def step_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Binary cross-entropy at the labelled tokens (B, T), mean over those of the whole optimizer step."""
    is_step = labels != IGNORED
    loss = nn.functional.binary_cross_entropy_with_logits(
        right_logits(outputs.logits)[is_step], labels[is_step], reduction="sum"
    )
    return loss / (is_step.sum() if num_items_in_batch is None else num_items_in_batch)


def compute_step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    scores, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    is_step = labels != IGNORED
    return step_metrics(
        [row[steps] for row, steps in zip(scores, is_step, strict=True)],
        [row[steps] for row, steps in zip(labels, is_step, strict=True)],
    )
