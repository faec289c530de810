from dataclasses import dataclass, field

from ..choices import check_at_least_one, unknown_choice
from ..prm.labelling import MODES
from .grpo_config import GRPOExtConfig


REWARD_UPDATES = ("outcome", "process", "none")
REFERENCE_UPDATES = ("reset", "ema", "none")


@dataclass
class IterativeGRPOConfig(GRPOExtConfig):
    r"""
    Configuration class for the [`IterativeGRPOTrainer`]: Algorithm 1 of DeepSeekMath (arXiv:2402.03300, 4.1.4).

    All of [`GRPOExtConfig`]'s parameters keep their names, defaults and meaning, but for `beta`, which is the paper's.
    `max_steps` follows from the first two below.

    Args:
        beta (`float`, *optional*, defaults to `0.04`):
            Coefficient of the divergence from the reference.
        num_rl_iterations (`int`, *optional*, defaults to `2`):
            Number of outer iterations, the algorithm's I. The paper runs two rounds.
        steps_per_rl_iteration (`int`, *optional*, defaults to `100`):
            Optimizer steps of each iteration. With one update an exploration, as in the paper, it is the algorithm's
            M, whose value the paper does not give.
        reward_update (`str`, *optional*, defaults to `"outcome"`):
            How the reward model is trained at the end of each iteration: on pairs of right and wrong outputs
            (`"outcome"`), on labelled steps (`"process"`), or not at all (`"none"`).
        reference_update (`str`, *optional*, defaults to `"reset"`):
            What happens to the reference at the start of each iteration after the first: it becomes the current policy
            (`"reset"`), moves towards it by `ref_model_mixup_alpha` (`"ema"`), or stays (`"none"`). That of the first
            iteration is the policy as it is then.
        replay_ratio (`float`, *optional*, defaults to `0.1`):
            Share of history among the examples of an update, from 0 to below 1. The paper's "10% of historical data"
            may be meant of the history; ours is of the mixture. There is no history in the first update.
        reward_model_learning_rate (`float`, *optional*, defaults to `2e-5`):
            Constant learning rate of the reward model. The paper's value is that of its first training.
        reward_model_epochs (`float`, *optional*, defaults to `1.0`):
            Epochs of an update.
        reward_model_batch_size (`int`, *optional*, defaults to `16`):
            Pairs (or solutions) a device in each step of an update.
        reward_eval_share (`float`, *optional*, defaults to `0.1`):
            Share of the questions on whose outputs the reward model is never trained, but measured.
        label_mode (`str`, *optional*, defaults to `"soft"`):
            How steps are labelled by sampling, see [`~trl_grpo_ext.prm.labelling.StepLabeller`]. Only without
            `step_verifier`.
        label_continuations (`int`, *optional*, defaults to `8`):
            Continuations of each prefix.
        label_completions (`int`, *optional*, defaults to `256`):
            Number of an iteration's completions that are labelled by sampling.
        shared_base (`bool`, *optional*, defaults to `False`):
            Whether the reward model is an adapter on the policy's base model, as the policy and its reference are
            (`peft_config`), so that one model, which may be quantized, is in memory instead of three.
        rollout_dir (`str`, *optional*):
            Where what was sampled is kept as parquet. By default `_rollouts` in `output_dir`; the underscore keeps it
            from being pushed to the Hub.
        rollout_capacity (`int`, *optional*, defaults to `100000`):
            Number of completions that are kept, the newest ones.

    Raises:
        `ValueError`: if a value is out of range, a combination cannot work, or an option would do nothing.
    """

    beta: float = field(default=0.04, metadata={"help": "Coefficient of the divergence from the reference."})
    max_steps: int = field(
        default=-1, metadata={"help": "Follows from `num_rl_iterations` and `steps_per_rl_iteration`."}
    )
    num_rl_iterations: int = field(default=2, metadata={"help": "Number of outer iterations."})
    steps_per_rl_iteration: int = field(default=100, metadata={"help": "Optimizer steps of each iteration."})
    reward_update: str = field(
        default="outcome",
        metadata={"help": "How the reward model is trained along.", "choices": list(REWARD_UPDATES)},
    )
    reference_update: str = field(
        default="reset",
        metadata={
            "help": "What happens to the reference at the start of an iteration.",
            "choices": list(REFERENCE_UPDATES),
        },
    )
    replay_ratio: float = field(
        default=0.1, metadata={"help": "Share of history among the examples of a reward model update."}
    )
    reward_model_learning_rate: float = field(default=2e-5, metadata={"help": "Learning rate of the reward model."})
    reward_model_epochs: float = field(default=1.0, metadata={"help": "Epochs of a reward model update."})
    reward_model_batch_size: int = field(
        default=16, metadata={"help": "Pairs (or solutions) a device in each step of a reward model update."}
    )
    reward_eval_share: float = field(
        default=0.1, metadata={"help": "Share of the questions that the reward model is never trained on."}
    )
    label_mode: str = field(
        default="soft", metadata={"help": "How steps are labelled by sampling.", "choices": list(MODES)}
    )
    label_continuations: int = field(default=8, metadata={"help": "Continuations of each prefix, for labelling."})
    label_completions: int = field(
        default=256, metadata={"help": "Number of an iteration's completions that are labelled by sampling."}
    )
    shared_base: bool = field(
        default=False, metadata={"help": "Whether the reward model is an adapter on the policy's base model."}
    )
    rollout_dir: str | None = field(
        default=None, metadata={"help": "Where what was sampled is kept; by default `_rollouts` in the output folder."}
    )
    rollout_capacity: int = field(default=100_000, metadata={"help": "Number of completions that are kept."})

    def __post_init__(self):
        check_at_least_one(
            num_rl_iterations=self.num_rl_iterations,
            steps_per_rl_iteration=self.steps_per_rl_iteration,
            reward_model_batch_size=self.reward_model_batch_size,
            label_continuations=self.label_continuations,
            label_completions=self.label_completions,
            rollout_capacity=self.rollout_capacity,
        )
        for name, choices in (
            ("reward_update", REWARD_UPDATES),
            ("reference_update", REFERENCE_UPDATES),
            ("label_mode", MODES),
        ):
            if getattr(self, name) not in choices:
                raise unknown_choice(name, getattr(self, name), choices)
        if not 0 <= self.replay_ratio < 1:
            raise ValueError(f"`replay_ratio` is {self.replay_ratio}, but must be from 0 to below 1.")
        if not 0 <= self.reward_eval_share < 1:
            raise ValueError(f"`reward_eval_share` is {self.reward_eval_share}, but must be from 0 to below 1.")
        for name in ("reward_model_learning_rate", "reward_model_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be above 0.")
        self._set_max_steps()
        super().__post_init__()
        self._check_iterations()

    def _set_max_steps(self):
        steps = self.num_rl_iterations * self.steps_per_rl_iteration
        if self.max_steps not in (-1, steps):
            raise ValueError(
                f"`max_steps` is {self.max_steps}, but `num_rl_iterations` times `steps_per_rl_iteration` is {steps}; "
                "leave `max_steps` out."
            )
        self.max_steps = steps

    def _check_iterations(self):
        generation = self.steps_per_generation * self.num_iterations
        if self.steps_per_rl_iteration * self.gradient_accumulation_steps % generation != 0:
            raise ValueError(
                f"`steps_per_rl_iteration` is {self.steps_per_rl_iteration}, by which an iteration ends within a "
                f"generation batch ({generation} micro-batches with {self.gradient_accumulation_steps} a step); make "
                "it a multiple."
            )
        if self.sync_ref_model:
            raise ValueError(
                "`sync_ref_model` is True, but the reference is updated by `reference_update`; leave it out."
            )
        if self.reference_update != "none" and self.beta == 0:
            raise ValueError(
                f"`reference_update` is {self.reference_update!r}, but without `beta` there is no reference; set "
                "`beta` (the paper: 0.04), or reference_update='none'."
            )
        labelling = (self.label_mode, self.label_continuations, self.label_completions)
        if self.reward_update != "process" and labelling != ("soft", 8, 256):
            raise ValueError(
                f"`label_mode`, `label_continuations` and `label_completions` are {labelling}, but `reward_update` is "
                f"{self.reward_update!r}, which labels no steps; leave them out, or use reward_update='process'."
            )
        if self.reward_update == "process" and not self.scores_steps:
            raise ValueError(
                "`reward_update` is 'process', but nothing uses the scores of steps; set supervision='process'."
            )
