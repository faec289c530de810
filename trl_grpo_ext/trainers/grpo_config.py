import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from ..steps import SeparatorSplitter


@dataclass
class GRPOExtConfig(GRPOConfig):
    r"""
    Configuration class for the [`GRPOExtTrainer`].

    All of [`~trl.GRPOConfig`]'s parameters keep their names, defaults and meaning; `loss_type`, `scale_rewards`,
    `beta`, `epsilon` and `num_iterations` apply to process supervision as well. With the parameters below at their
    defaults, training is `trl.GRPOTrainer`'s, bit for bit.

    Args:
        supervision (`str`, *optional*, defaults to `"outcome"`):
            What a token is rewarded for: `"outcome"` gives every token the advantage of its completion
            (arXiv:2402.03300, 4.1.2), `"process"` the sum of the normalized rewards of its own reasoning step and of
            the steps after it (4.1.3). Process supervision needs `step_reward_funcs` in the trainer; `reward_funcs`
            are then logged but do not train.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            What ends a reasoning step. A text without content of its own between two separators is no step.
        step_separator_is_regex (`bool`, *optional*, defaults to `False`):
            Whether `step_separator` is a regular expression.
        std_correction (`int`, *optional*, defaults to `1`):
            `1` divides advantages by the sample's standard deviation, as TRL does, `0` by the population's. The paper
            does not say which.
        std_eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation before dividing by it. Must be positive.
        zero_advantage_tolerance (`float`, *optional*, defaults to `1e-6`):
            A group whose rewards differ by no more than this counts as all-same: its advantages are exactly 0.

    Raises:
        `ValueError`: if a value is out of range, or a combination cannot work.
    """

    supervision: str = field(
        default="outcome",
        metadata={
            "help": "What a token is rewarded for: its completion ('outcome', arXiv:2402.03300 section 4.1.2) or its "
            "own reasoning step and those after it ('process', section 4.1.3).",
            "choices": ["outcome", "process"],
        },
    )
    step_separator: str = field(default="\n", metadata={"help": "What ends a reasoning step."})
    step_separator_is_regex: bool = field(
        default=False, metadata={"help": "Whether `step_separator` is a regular expression."}
    )
    std_correction: int = field(
        default=1,
        metadata={
            "help": "1 divides advantages by the sample's standard deviation, as TRL does, 0 by the population's.",
            "choices": [0, 1],
        },
    )
    std_eps: float = field(
        default=1e-4, metadata={"help": "Added to the standard deviation before dividing by it. Must be positive."}
    )
    zero_advantage_tolerance: float = field(
        default=1e-6,
        metadata={"help": "A group whose rewards differ by no more than this has advantages of exactly 0."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.supervision not in ("outcome", "process"):
            raise ValueError(f"`supervision` is {self.supervision!r}, but must be 'outcome' or 'process'.")
        if self.std_correction not in (0, 1) or isinstance(self.std_correction, bool):
            raise ValueError(
                f"`std_correction` is {self.std_correction!r}, but must be 0 (population) or 1 (sample, as TRL)."
            )
        if not 0 < self.std_eps < math.inf:
            raise ValueError(f"`std_eps` is {self.std_eps!r}, but must be positive and finite; TRL's value is 1e-4.")
        if not 0 <= self.zero_advantage_tolerance < math.inf:
            raise ValueError(
                f"`zero_advantage_tolerance` is {self.zero_advantage_tolerance!r}, but must be 0 or more, and finite."
            )
        SeparatorSplitter(self.step_separator, self.step_separator_is_regex)  # raises if it cannot split
        if self.supervision == "process":
            self._check_process_supervision()
        elif self.changes_outcome_advantages and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, which normalizes by "
                "TRL's constants; leave `std_correction`, `std_eps` and `zero_advantage_tolerance` at their defaults, "
                "or use 'sum_then_normalize'."
            )

    @property
    def changes_outcome_advantages(self) -> bool:
        """Whether outcome advantages are computed otherwise than TRL computes them."""
        return (self.std_correction, self.std_eps, self.zero_advantage_tolerance) != (1, 1e-4, 1e-6)

    def _check_process_supervision(self):
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"`importance_sampling_level` is {self.importance_sampling_level!r}, but with supervision='process' "
                "every token has its own advantage and needs its own ratio; use 'token'."
            )
        if self.loss_type in ("luspo", "vespo"):
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}, which weights whole sequences by one advantage, but with "
                "supervision='process' every token has its own; use 'grpo', 'dapo', 'dr_grpo', 'bnpo', 'cispo' or "
                "'sapo'."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but with "
                "supervision='process' step rewards are weighted, summed, then normalized; use 'sum_then_normalize'."
            )
