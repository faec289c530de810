from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.integrations import deepspeed as deepspeed_integration
from trl.trainer.utils import get_config_model_id

from .choices import check_at_least_one


class Scorer:
    """
    What outcome and process reward models have in common: a model by name or loaded, its tokenizer, its batches.

    Args:
        model (`str`, `Path` or [`~transformers.PreTrainedModel`]):
            A Hub id, a folder, or a loaded model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Its tokenizer, needed where `model` was not loaded from a folder or the Hub.
        batch_size (`int`):
            Number of completions in a forward pass.
        max_length (`int`, *optional*):
            Longest input in tokens.

    Raises:
        `ValueError`: if a number is out of range, or the tokenizer is missing.
        `TypeError`: if `model` is neither a name nor a model.
    """

    model: Any

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None, batch_size: int, max_length: int | None):
        check_at_least_one(batch_size=batch_size, max_length=max_length)
        if not isinstance(model, (str, Path, torch.nn.Module)):
            raise TypeError(f"`model` is {model!r}, but must be a Hub id, a folder or a loaded model.")
        loaded: Any = None if isinstance(model, (str, Path)) else model
        self.name_or_path = str(model) if loaded is None else get_config_model_id(loaded.config) or ""
        if not self.name_or_path and tokenizer is None:
            raise ValueError(
                "`tokenizer` is missing, but `model` was not loaded from a folder or the Hub; pass its own."
            )
        self.batch_size = batch_size
        self.max_length = max_length
        self.__name__ = Path(self.name_or_path).name or type(model).__name__

    def move_to(self, device: torch.device) -> None:
        """Move the model to a device, unless it is quantized or spread over several."""
        if not getattr(self.model, "is_quantized", False) and not hasattr(self.model, "hf_device_map"):
            self.model.to(device)


@contextmanager
def loaded_whole() -> Iterator[None]:
    """
    Within it transformers loads a model whole, also while a run with ZeRO-3 has it shard all that it loads.

    A sharded model would need DeepSpeed's engine around it and as many forward passes on each process; scorers make as
    many as their own completions need.
    """
    config = deepspeed_integration._hf_deepspeed_config_weak_ref
    deepspeed_integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed_integration._hf_deepspeed_config_weak_ref = config


def no_such_model(name_or_path: str, error: Exception, field: str = "model") -> ValueError:
    """The error to raise where there is no model of the name that a field has."""
    return ValueError(
        f"`{field}` is {name_or_path!r}, which is neither a folder with a model nor one that can be reached on the "
        f"Hub ({str(error).splitlines()[0]})."
    )
