import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

from trl_grpo_ext import GRPOExtConfig


def config(tmp_path, **options):
    return GRPOExtConfig(output_dir=str(tmp_path), bf16=False, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"supervision": "steps"}, "`supervision` is 'steps', but must be 'outcome' or 'process'"),
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
            "`multi_objective_aggregation` is 'normalize_then_sum', but with supervision='process'",
        ),
        (
            {"std_correction": 0, "multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum', which normalizes by TRL's constants",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config(tmp_path, **options)


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
