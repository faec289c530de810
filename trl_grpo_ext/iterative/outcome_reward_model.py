from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file
from trl.trainer.utils import get_config_model_id

from ..rewards.answer import completion_text


class OutcomeRewardModel:
    """
    A reward model that scores whole completions, as a reward function that can be trained on.

    It reads what TRL's [`~trl.RewardTrainer`] trains on: a conversation by the chat template, plain text with EOS
    after it. One function writes these ids for scoring and for training alike.

    What a score means: the log-odds that this completion is the better one of a pair are the difference of the two
    scores; alone a score means nothing. How it can be farmed: by whatever the pairs did not show to be wrong, the more
    so the farther the policy moves from what they were sampled from.

    Args:
        model (`str`, `Path` or [`~transformers.PreTrainedModel`]):
            A Hub id or a folder, also of adapters, or a loaded sequence classifier of one class.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Its tokenizer. By default loaded from `model`.
        batch_size (`int`, *optional*, defaults to `16`):
            Number of completions in a forward pass; completions of similar length go together.
        max_length (`int`, *optional*):
            Longest input in tokens. A longer one is not scored (`None`): what it ends with would be unseen.
        model_init_kwargs (`dict`, *optional*):
            Arguments for loading the model.

    Raises:
        `ValueError`: if there is no such model, it has no trained head or other than one class, or a number is out of
            range.
        `TypeError`: if `model` is neither a name nor a model.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, but must be 1 or more.")
        if not isinstance(model, (str, Path, torch.nn.Module)):
            raise TypeError(f"`model` is {model!r}, but must be a Hub id, a folder or a loaded model.")
        loaded: Any = None if isinstance(model, (str, Path)) else model
        name_or_path = str(model) if loaded is None else get_config_model_id(loaded.config)
        if not name_or_path and tokenizer is None:
            raise ValueError(
                "`tokenizer` is missing, but `model` was not loaded from a folder or the Hub; pass its own."
            )
        self.model: Any = load_scorer(name_or_path, model_init_kwargs or {}) if loaded is None else loaded
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"`model` has {self.model.config.num_labels} classes, but a reward model gives one score; load it "
                "with `num_labels=1`."
            )
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(name_or_path)
        self.pad_token_id = (
            self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        )
        self.model.config.get_text_config().pad_token_id = self.pad_token_id  # by it the last token is found
        if loaded is None:
            self.move_to(PartialState().device)
        self.batch_size = batch_size
        self.max_length = max_length
        self.__name__ = Path(name_or_path).name or type(self.model).__name__

    def move_to(self, device: torch.device) -> None:
        """Move the model to a device, unless it is quantized or spread over several."""
        if not getattr(self.model, "is_quantized", False) and not hasattr(self.model, "hf_device_map"):
            self.model.to(device)

    def encode(self, prompt: str | list, completion: str | list) -> list[int]:
        """Ids of a prompt with its completion, plain or conversational, as they are scored and trained on."""
        if isinstance(prompt, str):
            text = prompt + completion_text(completion)
            eos_token = self.tokenizer.eos_token or ""
            return self.tokenizer(text if text.endswith(eos_token) else text + eos_token)["input_ids"]
        text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def __call__(self, prompts: list, completions: list, **kwargs) -> list[float | None]:
        """
        Reward function: one score a completion, in eval mode and without gradients.

        Args:
            prompts, completions (`list`):
                Plain or conversational.
            **kwargs:
                Other columns, unused.

        Returns:
            `list[float | None]`: `None` for a completion that is longer than `max_length` with its prompt.
        """
        encoded = [self.encode(*pair) for pair in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(encoded)
        is_scored = [self.max_length is None or len(ids) <= self.max_length for ids in encoded]
        order = sorted((i for i, scored in enumerate(is_scored) if scored), key=lambda i: -len(encoded[i]))
        was_training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                for index, score in zip(batch, self._score_batch([encoded[i] for i in batch]), strict=True):
                    scores[index] = score
        finally:
            self.model.train(was_training)
        return scores

    def _score_batch(self, encoded: list[list[int]]) -> list[float]:
        device = next(self.model.parameters()).device
        length = max(map(len, encoded))
        ids = [row + [self.pad_token_id] * (length - len(row)) for row in encoded]
        mask = [[1] * len(row) + [0] * (length - len(row)) for row in encoded]
        outputs = self.model(
            input_ids=torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device)
        )
        return outputs.logits.squeeze(-1).float().tolist()


def load_scorer(name_or_path: str, model_init_kwargs: dict[str, Any]) -> PreTrainedModel:
    try:
        if find_adapter_config_file(name_or_path) is not None:
            from peft import AutoPeftModelForSequenceClassification

            return AutoPeftModelForSequenceClassification.from_pretrained(
                name_or_path, num_labels=1, is_trainable=True, **model_init_kwargs
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name_or_path, num_labels=1, output_loading_info=True, **model_init_kwargs
        )
    except RuntimeError as error:  # the head has another size
        raise ValueError(
            f"`model` is {name_or_path!r}, which does not fit a reward model of one score "
            f"({str(error).splitlines()[0]}); name a sequence classifier that was trained with `num_labels=1`."
        ) from error
    except (OSError, HFValidationError) as error:
        raise ValueError(
            f"`model` is {name_or_path!r}, which is neither a folder with a model nor one that can be reached on the "
            f"Hub ({str(error).splitlines()[0]})."
        ) from error
    if any(name.startswith("score") for name in info["missing_keys"]):
        raise ValueError(
            f"`model` is {name_or_path!r}, which has no trained score head; train one with TRL's RewardTrainer, or "
            "load the model yourself to start from a random head."
        )
    return model
