from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from ..batching import in_eval_mode, map_by_length, pad_right
from ..rewards.answer import completion_text
from ..scorer import Scorer, loaded_whole, no_such_model


class OutcomeRewardModel(Scorer):
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
        super().__init__(model, tokenizer, batch_size, max_length)
        is_name = isinstance(model, (str, Path))
        with loaded_whole():
            self.model = load_scorer(self.name_or_path, model_init_kwargs or {}) if is_name else model
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"`model` has {self.model.config.num_labels} classes, but a reward model gives one score; load it "
                "with `num_labels=1`."
            )
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(self.name_or_path)
        self.pad_token_id = (
            self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        )
        self.model.config.get_text_config().pad_token_id = self.pad_token_id  # by it the last token is found
        if is_name:
            self.move_to(PartialState().device)

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
        is_scored = [self.max_length is None or len(ids) <= self.max_length for ids in encoded]
        to_score = [ids for ids, scored in zip(encoded, is_scored, strict=True) if scored]
        with in_eval_mode(self.model):
            scores = iter(map_by_length(self._score_batch, to_score, self.batch_size))
        return [next(scores) if scored else None for scored in is_scored]

    def _score_batch(self, encoded: list[list[int]]) -> list[float]:
        device = next(self.model.parameters()).device
        outputs = self.model(**pad_right(encoded, self.pad_token_id, device))
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
        raise no_such_model(name_or_path, error) from error
    if any(name.startswith("score") for name in info["missing_keys"]):
        raise ValueError(
            f"`model` is {name_or_path!r}, which has no trained score head; train one with TRL's RewardTrainer, or "
            "load the model yourself to start from a random head."
        )
    return model
