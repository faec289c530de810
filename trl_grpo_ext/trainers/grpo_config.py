import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from ..choices import unknown_choice
from ..objective.advantages import BASELINES, GROUP_BASELINES
from ..objective.kl import CREDITS as KL_CREDITS
from ..objective.kl import ESTIMATORS, GRADIENTS, PLACEMENTS, check_kl
from ..objective.loss import RATIO_LEVELS
from ..objective.step_credit import CREDITS as STEP_CREDITS
from ..steps import SeparatorSplitter
from .pushing import KeepsToken


@dataclass
class GRPOExtConfig(KeepsToken, GRPOConfig):
    r"""
    Configuration class for the [`GRPOExtTrainer`].

    All of [`~trl.GRPOConfig`]'s parameters keep their names, defaults and meaning; `loss_type`, `scale_rewards`,
    `beta`, `epsilon` and `num_iterations` apply to process supervision as well. With the parameters below at their
    defaults, training is `trl.GRPOTrainer`'s, to rounding, but for where `pool_generation_batches` says; with that,
    `skip_zero_advantage` and `efficient_microbatches` off, bit for bit.

    `off_policy_mask_threshold` with token advantages masks tokens, not completions.

    `importance_sampling_level` has one more value, `"sequence_token"` (GSPO-token, arXiv:2507.18071): the ratio of the
    completion, with the gradient of each token. It is the sequence-level ratio for token advantages.

    Args:
        supervision (`str`, *optional*, defaults to `"outcome"`):
            What a token is rewarded for: `"outcome"` gives every token the advantage of its completion
            (arXiv:2402.03300, 4.1.2), `"process"` the sum of the normalized rewards of its own reasoning step and of
            the steps after it (4.1.3). Process supervision needs `step_reward_funcs` in the trainer; `reward_funcs`
            are then logged but do not train, unless `outcome_weight` says so.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            What ends a reasoning step. A text without content of its own between two separators is no step.
        step_separator_is_regex (`bool`, *optional*, defaults to `False`):
            Whether `step_separator` is a regular expression.
        step_credit (`str`, *optional*, defaults to `"sum_to_go"`):
            How step rewards become advantages: `"sum_to_go"` (the paper), `"mean_to_go"`, `"step"`, `"min"`,
            `"softmin"` (PURE, arXiv:2504.15275), `"delta"` or `"clip"` (Gao et al., arXiv:2410.15115), see
            [`~trl_grpo_ext.objective.step_credit.credit_steps`]. The paper's sum pays for additional steps.
        outcome_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the outcome advantage, from `reward_funcs`, that is added to the process advantage. Each is
            normalized on its own first, as in GDPO (arXiv:2601.05242).
        process_filter_keep (`float`, *optional*):
            Share of each group that trains, chosen by its step rewards: right completions of high and others of low
            mean step reward, in balance (PROF, arXiv:2509.03403). Step rewards then filter, and outcome rewards train.
            The advantages of the others are 0, and the statistics of the group are without them; the loss is still
            divided by all.
        advantage_baseline (`str`, *optional*, defaults to `"mean"`):
            What is subtracted from rewards: the `"mean"` of the group, of its other members (`"leave_one_out"`, RLOO,
            arXiv:2402.14740), of the generation `"batch"` (REINFORCE++, arXiv:2501.03262), or `"none"`. Scaling always
            divides by the standard deviation of the raw rewards.
        std_correction (`int`, *optional*, defaults to `1`):
            `1` divides advantages by the sample's standard deviation, as TRL does, `0` by the population's. The paper
            does not say which.
        std_eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation before dividing by it. Must be positive.
        zero_advantage_tolerance (`float`, *optional*, defaults to `1e-6`):
            A group whose rewards differ by no more than this counts as all-same: its advantages are exactly 0.
        live_group_denominator (`bool`, *optional*, defaults to `False`):
            Whether the policy term is averaged over completions (or tokens) of live groups only, leaving those of
            all-same groups out of the denominator of an optimizer step (of a generation batch, where that is made of
            several steps). Changes the objective: the fewer groups are live, the larger the step. The KL in the loss
            is still averaged over all.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            Estimator of the divergence from the reference: `"k1"`, `"k2"`, `"k3"` (the paper's Eq. 4) or `"exact"`
            (full vocabulary). `"abs"` is refused: it is for monitoring, and logged as `kl/abs`.
        kl_placement (`str`, *optional*, defaults to `"loss"`):
            Where the divergence goes: the `"loss"` (the paper), the `"reward"` (it is subtracted from the token
            advantages, as in PPO), or `"both"`. What each combination descends is in
            [`~trl_grpo_ext.objective.kl.EXPECTED_GRADIENT`]; what descends no divergence is refused.
        kl_gradient (`str`, *optional*):
            Gradient of the divergence in the loss: `"naive"` (of the estimator: the paper), `"straight_through"` (of
            k2), `"importance_weighted"` (of ratio times estimator, DeepSeek-V3.2). By default as TRL's
            `use_bias_correction_kl` says where there is a choice (k3 in the loss), the only possible one elsewhere.
        kl_credit (`str`, *optional*, defaults to `"suffix"`):
            What a token answers for where the divergence is part of the reward: that of itself and all later tokens
            (`"suffix"`), or of the whole `"sequence"`, which has the same expected gradient with more noise.
        kl_target (`float`, *optional*):
            Divergence a token, in nats, that `beta` is adapted to (Ziegler et al., arXiv:1909.08593): it is compared
            with the logged `kl` after every optimizer step, and survives a resume. `beta` is the first coefficient.
        kl_horizon (`float`, *optional*):
            Number of completions over which `beta` changes by up to 20 %. Needed with `kl_target`.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether groups whose advantages are all 0 are replaced by groups of further prompts, drawn from the
            training data in an order of their own (DAPO, arXiv:2503.14476, 3.2). What is sampled in excess is trained
            on in the next batch, with the ratio to the policy that sampled it. Metrics of rewards are those of all
            that was sampled.
        dynamic_sampling_max_rounds (`int`, *optional*, defaults to `4`):
            How often a batch is refilled at most; then it is trained on as it is.
        skip_zero_advantage (`bool`, *optional*, defaults to `True`):
            Whether completions of advantage 0, which without KL have no gradient, have no backward pass. Denominators
            and metrics stay those of all.
        efficient_microbatches (`bool`, *optional*, defaults to `True`):
            Whether padding is trimmed, rows of similar length are forwarded together, and the prompt of a group is
            computed once for all of its completions, of the policy and of the reference. The numbers stay the same,
            to rounding (with dropout, in distribution). Several forward passes make a loss then, as many as a process
            needs, so that buffers are not broadcast before each; with FSDP, DeepSpeed, `ddp_static_graph`,
            `ddp_broadcast_buffers` or `ddp_find_unused_parameters` (for models that leave some out of a pass) a batch
            is trimmed only, and with a router's loss (mixtures of experts) not even that. Prompts are computed once
            where nothing is dropped out or recomputed (`gradient_checkpointing`) and the model gives the same of two
            completions in either way, which is tried once.
        pool_generation_batches (`bool`, *optional*, defaults to `True`):
            Whether token-level losses divide by the tokens of the whole optimizer step where several generation
            batches make one, `gradient_accumulation_steps` being a multiple of `steps_per_generation` times
            `num_iterations`: these are then sampled one after another before the first loss, and so differ from TRL's
            for the same seed. `False` divides each by its own tokens, as TRL does, so that the tokens of short
            completions weigh more the smaller the generation batches are. Where one generation batch makes an
            optimizer step or more, or the one is no multiple of the other, both are the same.
        regroup_microbatches (`bool`, *optional*, defaults to `False`):
            Whether rows move between the micro-batches of an optimizer step, so that those of similar length, or with
            one prompt where it is computed once, are forwarded together: the smaller the micro-batches, the more this
            saves, and with one an optimizer step nothing. Loss and gradient stay the same, while entropy, KL and clip
            ratios are logged as TRL logs them, as means over micro-batches, and these are other ones.
        log_gradient_coefficient (`bool`, *optional*, defaults to `False`):
            Whether to log mean and standard deviation, over the tokens of an optimizer step, of the coefficient that
            multiplies a sampled token's gradient (the paper's Eq. 5), as `gradient_coefficient/mean` and
            `gradient_coefficient/std`. What acts on the whole distribution is not in it: the exact KL, the entropy.

    Raises:
        `ValueError`: if a value is out of range, a combination cannot work, or an option would do nothing.
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
    step_credit: str = field(
        default="sum_to_go",
        metadata={
            "help": "How the rewards of steps become their advantages; 'sum_to_go' is the paper's.",
            "choices": list(STEP_CREDITS),
        },
    )
    outcome_weight: float = field(
        default=0.0, metadata={"help": "Weight of the outcome advantage that is added to the process advantage."}
    )
    process_filter_keep: float | None = field(
        default=None,
        metadata={
            "help": "Share of each group that trains, chosen by its step rewards as in PROF (arXiv:2509.03403)."
        },
    )
    advantage_baseline: str = field(
        default="mean",
        metadata={
            "help": "What is subtracted from rewards: the mean of the group, of its other members, of the batch, or "
            "nothing.",
            "choices": list(BASELINES),
        },
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
    live_group_denominator: bool = field(
        default=False,
        metadata={"help": "Whether the policy term is averaged over live groups only, without the all-same ones."},
    )
    kl_estimator: str = field(
        default="k3",
        metadata={
            "help": "Estimator of the divergence from the reference; 'k3' is the paper's.",
            "choices": list(ESTIMATORS),
        },
    )
    kl_placement: str = field(
        default="loss",
        metadata={
            "help": "Where the divergence goes; 'loss' is the paper's choice, 'reward' PPO's.",
            "choices": list(PLACEMENTS),
        },
    )
    kl_gradient: str | None = field(
        default=None,
        metadata={
            "help": "Gradient of the divergence in the loss; 'naive' is the paper's. By default as TRL's "
            "`use_bias_correction_kl` says.",
            "choices": list(GRADIENTS),
        },
    )
    kl_credit: str = field(
        default="suffix",
        metadata={
            "help": "What a token answers for where the divergence is part of the reward.",
            "choices": list(KL_CREDITS),
        },
    )
    kl_target: float | None = field(
        default=None, metadata={"help": "Divergence a token, in nats, that `beta` is adapted to."}
    )
    kl_horizon: float | None = field(
        default=None, metadata={"help": "Number of completions over which `beta` changes by up to a fifth."}
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={"help": "Whether groups of equal rewards are replaced by groups of further prompts, as in DAPO."},
    )
    dynamic_sampling_max_rounds: int = field(
        default=4, metadata={"help": "How often a batch is refilled at most by `dynamic_sampling`."}
    )
    skip_zero_advantage: bool = field(
        default=True, metadata={"help": "Whether completions of advantage 0 without KL have no backward pass."}
    )
    efficient_microbatches: bool = field(
        default=True, metadata={"help": "Whether padding is trimmed and rows are grouped by length."}
    )
    pool_generation_batches: bool = field(
        default=True,
        metadata={
            "help": "Whether token-level losses divide by the tokens of the whole optimizer step where several "
            "generation batches make one; TRL divides each by its own."
        },
    )
    regroup_microbatches: bool = field(
        default=False,
        metadata={
            "help": "Whether rows move between the micro-batches of an optimizer step, to be of similar length."
        },
    )
    log_gradient_coefficient: bool = field(
        default=False,
        metadata={"help": "Whether to log mean and std of the gradient coefficient, the paper's Eq. 5."},
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_values()
        SeparatorSplitter(self.step_separator, self.step_separator_is_regex)  # raises if it cannot split
        self._check_supervision()
        if self.has_token_advantages:
            self._check_token_advantages()
        self._check_kl()
        if self.importance_sampling_level == "sequence_token" and self.loss_type in ("luspo", "vespo"):
            raise ValueError(
                f"`importance_sampling_level` is 'sequence_token', but `loss_type` {self.loss_type!r} has a sequence "
                "ratio of its own; use another loss type."
            )
        if self.live_group_denominator:
            self._check_live_group_denominator()
        self._check_dynamic_sampling()
        if self.regroup_microbatches:
            self._check_regroup_microbatches()

    @property
    def scores_steps(self) -> bool:
        """Whether completions are cut into steps and these are scored."""
        return self.supervision == "process" or self.process_filter_keep is not None

    @property
    def has_token_advantages(self) -> bool:
        """Whether tokens of one completion may have different advantages."""
        return self.supervision == "process" or self.kl_placement != "loss"

    @property
    def changes_outcome_advantages(self) -> bool:
        """Whether outcome advantages are computed otherwise than TRL computes them."""
        options = (self.std_correction, self.std_eps, self.zero_advantage_tolerance, self.advantage_baseline)
        is_changed = options != (1, 1e-4, 1e-6, "mean")
        # TRL's own advantages of an all-same group are rounding noise, by which it would count as live.
        needs_exact_zeros = self.live_group_denominator or self.dynamic_sampling
        return is_changed or self.process_filter_keep is not None or needs_exact_zeros

    @property
    def changes_kl(self) -> bool:
        """Whether the divergence is computed otherwise than TRL computes it."""
        return (self.kl_estimator, self.kl_placement, self.kl_gradient, self.kl_target) != ("k3", "loss", None, None)

    @property
    def resolved_kl_gradient(self) -> str:
        """`kl_gradient`, or what it is by default."""
        if self.kl_gradient is not None:
            return self.kl_gradient
        has_choice = self.kl_placement == "loss" and self.kl_estimator in ("k1", "k3")
        return "importance_weighted" if has_choice and self.use_bias_correction_kl else "naive"

    def _check_values(self):
        optional = ("process_filter_keep", "kl_target", "kl_horizon")
        for name in ("outcome_weight", "std_eps", "zero_advantage_tolerance", *optional):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and not (value is None and name in optional):
                raise TypeError(f"`{name}` is {value!r}, but must be a number.")
        for name in (
            "step_separator_is_regex",
            "live_group_denominator",
            "dynamic_sampling",
            "log_gradient_coefficient",
            "skip_zero_advantage",
            "efficient_microbatches",
            "pool_generation_batches",
            "regroup_microbatches",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` is {getattr(self, name)!r}, but must be True or False.")
        for name, choices in (
            ("supervision", ("outcome", "process")),
            ("step_credit", STEP_CREDITS),
            ("advantage_baseline", BASELINES),
            ("importance_sampling_level", RATIO_LEVELS),
            ("kl_credit", KL_CREDITS),
        ):
            if getattr(self, name) not in choices:
                raise unknown_choice(name, getattr(self, name), choices)
        if self.std_correction not in (0, 1) or isinstance(self.std_correction, bool):
            raise ValueError(
                f"`std_correction` is {self.std_correction!r}, but must be 0 (population) or 1 (sample, as TRL)."
            )
        if not 0 < self.std_eps < math.inf:
            raise ValueError(f"`std_eps` is {self.std_eps!r}, but must be positive and finite; TRL's value is 1e-4.")
        for name in ("zero_advantage_tolerance", "outcome_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be 0 or more, and finite.")
        if self.process_filter_keep is not None:
            num_kept = round(self.process_filter_keep * self.num_generations)
            if not 2 <= num_kept < self.num_generations:
                raise ValueError(
                    f"`process_filter_keep` is {self.process_filter_keep!r}, which keeps {num_kept} of "
                    f"{self.num_generations} completions, but must keep at least 2 and not all; leave it out to train "
                    "on all."
                )

    def _check_supervision(self):
        if self.step_credit == "delta" and self.outcome_weight == 0:
            raise ValueError(
                "`step_credit` is 'delta', which leaves the last step to the outcome, but `outcome_weight` is 0; set "
                "it, to 1 for instance."
            )
        if self.supervision == "process" and self.process_filter_keep is not None:
            raise ValueError(
                f"`process_filter_keep` is {self.process_filter_keep}, by which step rewards only filter, but "
                "supervision='process' trains on them; use one or the other."
            )
        if self.supervision == "outcome":
            needs_process = {"step_credit": "sum_to_go", "outcome_weight": 0.0}
            needs_steps = {} if self.scores_steps else {"step_separator": "\n", "step_separator_is_regex": False}
            for name, default in {**needs_process, **needs_steps}.items():
                if getattr(self, name) != default:
                    raise ValueError(
                        f"`{name}` is {getattr(self, name)!r}, which does nothing with supervision='outcome'; set "
                        "supervision='process', or leave it out."
                    )
        if self.multi_objective_aggregation != "sum_then_normalize" and (
            self.supervision == "process" or self.changes_outcome_advantages
        ):
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, which normalizes outcome "
                "rewards by TRL's constants; use 'sum_then_normalize' with supervision='process', and wherever "
                "`advantage_baseline`, `std_correction`, `std_eps`, `zero_advantage_tolerance`, `process_filter_keep` "
                "`live_group_denominator` or `dynamic_sampling` is changed."
            )

    def _check_live_group_denominator(self):
        if not self.pool_generation_batches:
            raise ValueError(
                "`live_group_denominator` is True, which counts the live groups of a whole optimizer step, but "
                "`pool_generation_batches` is False; leave one of them out."
            )
        if self.loss_type == "bnpo":
            raise ValueError(
                "`live_group_denominator` is True, but `loss_type` 'bnpo' divides by the tokens of each micro-batch, "
                "whichever groups they are of; use 'dapo'."
            )
        if self.advantage_baseline not in GROUP_BASELINES:
            raise ValueError(
                f"`live_group_denominator` is True, but with `advantage_baseline` {self.advantage_baseline!r} "
                "all-same groups train, too; use 'mean' or 'leave_one_out'."
            )
        accumulation = self.gradient_accumulation_steps
        window = self.steps_per_generation * self.num_iterations
        if window % accumulation != 0 and accumulation % window != 0:
            raise ValueError(
                f"`live_group_denominator` is True, but an optimizer step of {accumulation} micro-batches is not made "
                f"of whole generation batches, used for {window} each; make one of `gradient_accumulation_steps` and "
                "`steps_per_generation` times `num_iterations` a multiple of the other."
            )

    def _check_regroup_microbatches(self):
        accumulation, window = self.gradient_accumulation_steps, self.steps_per_generation
        has_entropy_bonus = self.entropy_coef != 0 or self.use_adaptive_entropy
        for cannot, reason in (
            (
                accumulation > 1 and math.gcd(accumulation, window) == 1,
                f"`gradient_accumulation_steps` {accumulation} and `steps_per_generation` {window} have no common "
                "factor, so that no rows can move within an optimizer step; change one",
            ),
            (
                not self.efficient_microbatches,
                "`efficient_microbatches` is False, and all padding is computed; set it to True",
            ),
            (self.loss_type == "bnpo", "`loss_type` 'bnpo' divides by the tokens of a micro-batch; use 'dapo'"),
            (self.top_entropy_quantile < 1, "`top_entropy_quantile` is of a micro-batch; set it to 1"),
            (
                has_entropy_bonus,
                "the entropy bonus is a mean over a micro-batch; set `entropy_coef` to 0 and `use_adaptive_entropy` "
                "to False",
            ),
        ):
            if cannot:
                raise ValueError(f"`regroup_microbatches` is True, but {reason}, or leave it out.")

    def _check_dynamic_sampling(self):
        rounds = self.dynamic_sampling_max_rounds
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise ValueError(f"`dynamic_sampling_max_rounds` is {rounds!r}, but must be a whole number, 1 or more.")
        if not self.dynamic_sampling:
            if rounds != 4:
                raise ValueError(
                    f"`dynamic_sampling_max_rounds` is {rounds}, which does nothing without `dynamic_sampling`; set "
                    "it, or leave it out."
                )
            return
        completions = self.per_device_train_batch_size * self.steps_per_generation
        if completions % self.num_generations != 0:
            raise ValueError(
                f"`dynamic_sampling` is True, but the {completions} completions that a process samples at once are "
                f"not made of whole groups of {self.num_generations}; make `per_device_train_batch_size` times "
                "`steps_per_generation` a multiple of `num_generations`."
            )
        needs_other_values = {
            "advantage_baseline": (self.advantage_baseline in GROUP_BASELINES, "all-same groups train, too", "'mean'"),
            "scale_rewards": (
                self.scale_rewards != "batch",
                "groups of several batches have another scale",
                "'group'",
            ),
            "kl_estimator": (self.kl_estimator != "exact", "groups may wait, and hidden states are not kept", "'k3'"),
            "sync_ref_model": (not self.sync_ref_model, "groups may wait until the reference has moved", "False"),
        }
        for name, (is_possible, reason, way_out) in needs_other_values.items():
            if not is_possible:
                raise ValueError(
                    f"`dynamic_sampling` is True, but with `{name}` {getattr(self, name)!r} {reason}; use {way_out}, "
                    "or leave it out."
                )

    def _check_token_advantages(self):
        cause = "supervision='process'" if self.supervision == "process" else f"kl_placement={self.kl_placement!r}"
        if self.importance_sampling_level == "sequence":
            raise ValueError(
                f"`importance_sampling_level` is 'sequence', but with {cause} every token has its own advantage, "
                "which the gradient of a sequence's ratio would mix; use 'token', or 'sequence_token' (GSPO-token)."
            )
        if self.loss_type in ("luspo", "vespo"):
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}, which weights whole sequences by one advantage, but with {cause} "
                "every token has its own; use 'grpo', 'dapo', 'dr_grpo', 'bnpo', 'cispo' or 'sapo'."
            )

    def _check_kl(self):
        check_kl(self.kl_estimator, self.kl_placement, self.resolved_kl_gradient)
        if self.kl_credit != "suffix" and self.kl_placement == "loss":
            raise ValueError(
                f"`kl_credit` is {self.kl_credit!r}, which does nothing with kl_placement='loss'; use "
                "kl_placement='reward', or leave it out."
            )
        if (self.kl_target is None) != (self.kl_horizon is None):
            raise ValueError(
                f"`kl_target` is {self.kl_target} and `kl_horizon` is {self.kl_horizon}, but one needs the other; "
                "give both to adapt `beta`, or neither."
            )
        if self.kl_target is not None and self.kl_horizon is not None:
            if not 0 < self.kl_target < math.inf:
                raise ValueError(f"`kl_target` is {self.kl_target!r}, but must be positive and finite.")
            completions = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
            if not completions <= self.kl_horizon < math.inf:
                raise ValueError(
                    f"`kl_horizon` is {self.kl_horizon!r}, but must be at least the {completions} completions of an "
                    "optimizer step, and finite."
                )
        num_updates = self.num_iterations * max(1, self.steps_per_generation // self.gradient_accumulation_steps)
        if self.kl_estimator == "exact" and num_updates > 1 and (self.kl_placement == "both" or self.sync_ref_model):
            raise ValueError(
                f"`kl_estimator` is 'exact', which with kl_placement={self.kl_placement!r} and sync_ref_model="
                f"{self.sync_ref_model} needs the models as they were when sampling, but there are {num_updates} "
                "updates a generation batch; make it one (`num_iterations`, `steps_per_generation`), or use 'k3'."
            )
        if self.changes_kl and self.beta == 0:
            raise ValueError(
                "`beta` is 0, so that there is no divergence for `kl_estimator`, `kl_placement`, `kl_gradient` or "
                "`kl_target` to act on; set `beta` (the paper's is 0.04), or leave them out."
            )
