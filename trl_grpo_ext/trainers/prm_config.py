from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..steps import from_command_line
from .pushing import KeepsToken


@dataclass
class PRMConfig(KeepsToken, TrainingArguments):
    r"""
    Configuration class for the [`PRMTrainer`].

    The parameters have the names and meaning that TRL's PRMConfig had up to 1.13.

    Args:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            Initial learning rate.
        head_learning_rate (`float`, *optional*):
            Initial learning rate of the classification head. A head that is new needs a larger one than what it stands
            on, which it would else undo before it has learned. By default `learning_rate`.
        max_length (`int`, *optional*, defaults to `1024`):
            Longest input, in tokens of prompt and steps. What is beyond is cut off, and its steps do not train.
        max_completion_length (`int`, *optional*):
            Longest completion, in tokens, cut off likewise.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            What follows each step, and at whose last token it is labelled and scored. `\n` written as two characters,
            as a shell passes it, is a line end.
        train_on_last_step_only (`bool`, *optional*, defaults to `False`):
            Whether only the last step of a completion trains, which makes an outcome reward model.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to switch dropout off.
        model_init_kwargs (`dict`, *optional*):
            Arguments for loading the model, where it is given by name.

    Raises:
        `ValueError`: if a length is below 1 or `step_separator` is empty.
    """

    learning_rate: float = field(default=1e-5, metadata={"help": "Initial learning rate."})
    head_learning_rate: float | None = field(
        default=None, metadata={"help": "Initial learning rate of the classification head."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest input, in tokens of prompt and steps."})
    max_completion_length: int | None = field(default=None, metadata={"help": "Longest completion, in tokens."})
    step_separator: str = field(default="\n", metadata={"help": "What follows each step."})
    train_on_last_step_only: bool = field(
        default=False, metadata={"help": "Whether only the last step of a completion trains."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Whether to switch dropout off."})
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Number of processes that tokenize the data."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments for loading the model, where it is given by name."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_length", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, but must be 1 or more, or None for no limit.")
        self.step_separator = from_command_line(self.step_separator)
        if not self.step_separator:
            raise ValueError("`step_separator` is empty, but a step is scored at its last token; use '\\n'.")
