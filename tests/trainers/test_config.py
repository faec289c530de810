import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

from trl_grpo_ext import GRPOExtConfig


def config(tmp_path, **options):
    return GRPOExtConfig(output_dir=str(tmp_path), bf16=False, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"supervision": "steps"}, "`supervision` is 'steps', but must be one of 'outcome', 'process'"),
        ({"std_correction": 2}, "`std_correction` is 2, but must be 0"),
        ({"std_eps": 0.0}, "`std_eps` is 0.0, but must be positive"),
        ({"std_correction": True}, "`std_correction` is True, but must be 0"),
        ({"std_eps": float("inf")}, "`std_eps` is inf, but must be positive and finite"),
        ({"step_separator": 5}, "`step_separator` is 5, but must be a text"),
        ({"std_eps": float("nan")}, "`std_eps` is nan, but must be positive"),
        ({"zero_advantage_tolerance": -1.0}, "`zero_advantage_tolerance` is -1.0, but must be 0 or more"),
        ({"step_separator": ""}, "`step_separator` is '', which matches the empty string"),
        ({"step_separator": "(", "step_separator_is_regex": True}, "which is no regular expression"),
        (
            {"supervision": "process", "importance_sampling_level": "sequence"},
            "`importance_sampling_level` is 'sequence', but with supervision='process'",
        ),
        ({"supervision": "process", "loss_type": "luspo"}, "`loss_type` is 'luspo', which weights whole sequences"),
        ({"supervision": "process", "loss_type": "vespo"}, "`loss_type` is 'vespo', which weights whole sequences"),
        (
            {"supervision": "process", "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes outcome rewards by TRL's",
        ),
        (
            {"std_correction": 0, "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes outcome rewards by TRL's",
        ),
        (
            {"advantage_baseline": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes outcome rewards by TRL's",
        ),
        ({"advantage_baseline": "median"}, "`advantage_baseline` is 'median', but must be one of 'mean'"),
        ({"supervision": "process", "step_credit": "max"}, "`step_credit` is 'max', but must be one of"),
        ({"step_credit": "min"}, "`step_credit` is 'min', which does nothing with supervision='outcome'"),
        ({"outcome_weight": 1.0}, "`outcome_weight` is 1.0, which does nothing with supervision='outcome'"),
        ({"step_separator": "§"}, "`step_separator` is '§', which does nothing with supervision='outcome'"),
        ({"step_separator_is_regex": True}, "`step_separator_is_regex` is True, which does nothing with"),
        ({"supervision": "process", "outcome_weight": -1.0}, "`outcome_weight` is -1.0, but must be 0 or more"),
        ({"process_filter_keep": 1.0}, "`process_filter_keep` is 1.0, which keeps 8 of 8 completions, but must keep"),
        ({"process_filter_keep": 0.1}, "`process_filter_keep` is 0.1, which keeps 1 of 8 completions, but must keep"),
        (
            {"live_group_denominator": True, "advantage_baseline": "batch"},
            "`live_group_denominator` is True, but with `advantage_baseline` 'batch' all-same groups train, too",
        ),
        (
            {"live_group_denominator": True, "pool_generation_batches": False},
            "`live_group_denominator` is True, which counts the live groups of a whole optimizer step, but "
            "`pool_generation_batches` is False",
        ),
        (
            {"live_group_denominator": True, "gradient_accumulation_steps": 3, "steps_per_generation": 2},
            "`live_group_denominator` is True, but an optimizer step of 3 micro-batches is not made of whole",
        ),
        (
            {
                "live_group_denominator": True,
                "gradient_accumulation_steps": 6,
                "steps_per_generation": 2,
                "num_iterations": 2,
            },
            "`live_group_denominator` is True, but an optimizer step of 6 micro-batches is not made of whole "
            "generation batches, used for 4 each",
        ),
        (
            {"live_group_denominator": True, "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes outcome rewards by TRL's",
        ),
        (
            {"supervision": "process", "step_credit": "delta"},
            "`step_credit` is 'delta', which leaves the last step to the outcome, but `outcome_weight` is 0",
        ),
        (
            {"beta": 0.1, "kl_estimator": "exact", "kl_placement": "both", "num_iterations": 2},
            "needs the models as they were when sampling, but there are 2 updates",
        ),
        (
            {"beta": 0.1, "kl_estimator": "exact", "sync_ref_model": True, "steps_per_generation": 4},
            "needs the models as they were when sampling, but there are 4 updates",
        ),
        (
            {"process_filter_keep": 0.5, "supervision": "process"},
            "`process_filter_keep` is 0.5, by which step rewards only filter, but",
        ),
        (
            {"process_filter_keep": 0.5, "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes outcome rewards by TRL's",
        ),
        (
            {"live_group_denominator": True, "loss_type": "bnpo"},
            "`live_group_denominator` is True, but `loss_type` 'bnpo'",
        ),
        ({"importance_sampling_level": "word"}, "`importance_sampling_level` is 'word', but must be one of 'token'"),
        (
            {"importance_sampling_level": "sequence_token", "loss_type": "vespo"},
            "`importance_sampling_level` is 'sequence_token', but `loss_type` 'vespo' has a sequence ratio",
        ),
        ({"kl_estimator": "k2"}, "`beta` is 0, so that there is no divergence for `kl_estimator`"),
        ({"kl_gradient": "naive"}, "`beta` is 0, so that there is no divergence"),
        ({"kl_target": 0.1, "kl_horizon": 1000}, "`beta` is 0, so that there is no divergence"),
        ({"beta": 0.1, "kl_estimator": "k4"}, "`kl_estimator` is 'k4', but must be one of"),
        (
            {"beta": 0.1, "kl_estimator": "abs"},
            "`kl_estimator` 'abs' with `kl_placement` 'loss' and `kl_gradient` 'naive' is",
        ),
        ({"beta": 0.1, "kl_placement": "reward"}, "`kl_estimator` 'k3' with `kl_placement` 'reward'"),
        (
            {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
            "`kl_estimator` 'k1' with `kl_placement` 'loss' and `kl_gradient` 'naive' has an expected gradient of",
        ),
        (
            {"dynamic_sampling_max_rounds": 2},
            "`dynamic_sampling_max_rounds` is 2, which does nothing without `dynamic_sampling`",
        ),
        (
            {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 0},
            "`dynamic_sampling_max_rounds` is 0, but must be a whole number, 1 or more",
        ),
        (
            {"dynamic_sampling": True, "advantage_baseline": "batch"},
            "`dynamic_sampling` is True, but with `advantage_baseline` 'batch' all-same groups train, too",
        ),
        (
            {"dynamic_sampling": True, "scale_rewards": "batch"},
            "`dynamic_sampling` is True, but with `scale_rewards` 'batch' groups of several batches",
        ),
        (
            {"dynamic_sampling": True, "beta": 0.1, "kl_estimator": "exact"},
            "`dynamic_sampling` is True, but with `kl_estimator` 'exact' groups may wait",
        ),
        (
            {"dynamic_sampling": True, "beta": 0.1, "sync_ref_model": True},
            "`dynamic_sampling` is True, but with `sync_ref_model` True groups may wait",
        ),
        ({"kl_credit": "sequence"}, "`kl_credit` is 'sequence', which does nothing with kl_placement='loss'"),
        ({"kl_credit": "token"}, "`kl_credit` is 'token', but must be one of 'suffix', 'sequence'"),
        ({"beta": 0.1, "kl_target": 0.1}, "`kl_target` is 0.1 and `kl_horizon` is None, but one needs the other"),
        ({"beta": 0.1, "kl_horizon": 100}, "`kl_target` is None and `kl_horizon` is 100, but one needs the other"),
        ({"beta": 0.1, "kl_target": 0.0, "kl_horizon": 100}, "`kl_target` is 0.0, but must be positive"),
        (
            {"beta": 0.1, "kl_target": 0.1, "kl_horizon": 7},
            "`kl_horizon` is 7, but must be at least the 8 completions",
        ),
        (
            {"beta": 0.1, "kl_estimator": "k1", "kl_placement": "reward", "importance_sampling_level": "sequence"},
            "`importance_sampling_level` is 'sequence', but with kl_placement='reward' every token has its own",
        ),
        (
            {"beta": 0.1, "kl_estimator": "k1", "kl_placement": "reward", "loss_type": "luspo"},
            "`loss_type` is 'luspo', which weights whole sequences by one advantage, but with kl_placement='reward'",
        ),
        *(
            ({"regroup_microbatches": True, "gradient_accumulation_steps": 2, **options}, message)
            for options, message in (
                ({"steps_per_generation": 3}, "`gradient_accumulation_steps` 2 and `steps_per_generation` 3 have"),
                ({"efficient_microbatches": False}, "`efficient_microbatches` is False, and all padding is computed"),
                ({"loss_type": "bnpo"}, "`loss_type` 'bnpo' divides by the tokens of a micro-batch"),
                ({"top_entropy_quantile": 0.5}, "`top_entropy_quantile` is of a micro-batch"),
                ({"entropy_coef": 0.1}, "the entropy bonus is a mean over a micro-batch"),
                ({"use_adaptive_entropy": True}, "set `entropy_coef` to 0 and `use_adaptive_entropy` to False"),
            )
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config(tmp_path, **options)


def test_dynamic_sampling_wants_whole_groups_on_each_process(tmp_path):
    args = config(tmp_path, dynamic_sampling=True)
    args.per_device_train_batch_size = args.num_generations // 2  # as with two processes, which TRL allows
    with pytest.raises(ValueError, match="completions that a process samples at once are not made of whole groups"):
        args.__class__._check_dynamic_sampling(args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std_eps": "1e-4"}, "`std_eps` is '1e-4', but must be a number"),
        ({"outcome_weight": None}, "`outcome_weight` is None, but must be a number"),
        ({"kl_target": "0.1"}, "`kl_target` is '0.1', but must be a number"),
        ({"pool_generation_batches": 1}, "`pool_generation_batches` is 1, but must be True or False"),
        ({"live_group_denominator": "x"}, "`live_group_denominator` is 'x', but must be True or False"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, options, message):
    with pytest.raises(TypeError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "importance_weighted"),
        ({"use_bias_correction_kl": False}, "naive"),
        ({"kl_estimator": "k1"}, "importance_weighted"),
        ({"kl_estimator": "k2"}, "naive"),
        ({"kl_estimator": "exact"}, "naive"),
        ({"kl_estimator": "k1", "kl_placement": "reward"}, "naive"),
        ({"kl_placement": "both"}, "naive"),
        ({"kl_gradient": "straight_through"}, "straight_through"),
    ],
)
def test_gradient_of_the_kl_is_trls_unless_told_or_without_choice(tmp_path, options, expected):
    assert config(tmp_path, beta=0.1, **options).resolved_kl_gradient == expected


def test_trl_parameters_keep_their_defaults(tmp_path):
    ours, theirs = config(tmp_path), GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none")
    # `logging_dir` and the like carry the time of construction
    for field in dataclasses.fields(GRPOConfig):
        if "logging_dir" not in field.name:
            assert repr(getattr(ours, field.name)) == repr(getattr(theirs, field.name)), field.name


def test_parses_from_the_command_line(tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--supervision", "process", "--std_correction", "0", "--bf16", "false"]
    (parsed,) = TrlParser(GRPOExtConfig).parse_args_and_config(arguments)
    assert (parsed.supervision, parsed.std_correction) == ("process", 0)
