"""What the README says of the code is true of the code."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest
from trl import GRPOConfig

from trl_grpo_ext import GRPOExtConfig, IterativeGRPOConfig


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAPER_TABLE = README.split("## The paper in this code")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(trl_grpo_ext\.[\w.]+)`", PAPER_TABLE))))
def test_functions_of_the_paper_table_exist(name):
    module, _, attribute = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b(?:tests|recipes|trl_grpo_ext)/[\w/.]+\w", README))))
def test_files_that_are_named_exist(path):
    assert (ROOT / path).exists()


def test_every_option_of_ours_is_in_the_table_with_its_default():
    ours = {field.name: field for field in dataclasses.fields(GRPOExtConfig)}
    for name in set(ours) - {field.name for field in dataclasses.fields(GRPOConfig)} - {"step_separator_is_regex"}:
        value = ours[name].default
        default = {1e-4: "1e-4", 1e-6: "1e-6"}.get(value, json.dumps(value) if isinstance(value, str) else repr(value))
        assert f"| `{name}` | `{default}` |" in README, name


def test_every_option_of_the_iterations_is_in_their_table_with_its_default():
    names = {field.name for field in dataclasses.fields(GRPOExtConfig)}
    for field in dataclasses.fields(IterativeGRPOConfig):
        if field.name not in names:
            default = json.dumps(field.default) if isinstance(field.default, str) else repr(field.default)
            assert f"| `{field.name}` | `{default}` |" in README, field.name


def test_test_command_is_what_ci_runs():
    command = re.search(r"python -m pytest.*", README).group()
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()
