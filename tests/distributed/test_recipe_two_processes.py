"""The main recipe with a process reward model on two gloo processes: the numbers of one, and a resume."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_grpo_ext.tasks import EMBEDDED_POLICY

from ..trainers.helpers import TIMINGS, assert_equal_weights
from .recipe_two_processes import GIVEN_STEPS, save_prm, train
from .test_two_processes import launch


GIVEN, LAST = f"checkpoint-{GIVEN_STEPS}", f"checkpoint-{GIVEN_STEPS + 1}"


def train_in_two(folder, name, *arguments):
    launch("-m", "tests.distributed.recipe_two_processes", str(folder), name, *arguments)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save_prm(folder / "prm")
    train_in_two(folder, "whole")
    return folder


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    save_prm(folder / "prm")
    train(folder, "whole")
    return folder


def log_history(checkpoint):
    entries = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [
        {name: value for name, value in entry.items() if not any(timing in name for timing in TIMINGS)}
        for entry in entries
    ]


def distance(first, second):
    models = [AutoModelForCausalLM.from_pretrained(folder).parameters() for folder in (first, second)]
    return torch.cat([(a - b).flatten() for a, b in zip(*models, strict=True)]).norm().item()


def test_every_metric_is_that_of_one_process(of_two, of_one):
    ours, theirs = (log_history(folder / "whole" / GIVEN) for folder in (of_two, of_one))
    assert len(ours) == GIVEN_STEPS + 1  # and an evaluation
    for first, second in zip(ours, theirs, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():  # a metric that does not exist is null
            assert value == second[name] or value == pytest.approx(second[name], rel=1e-3, abs=1e-5), name


def test_what_is_compared_is_not_trivial(of_one):
    *steps, evaluation = log_history(of_one / "whole" / GIVEN)
    rewards = [step["step_rewards/prm/mean"] for step in steps]
    assert all(0 < reward < 1 for reward in rewards)
    assert len(set(rewards)) == GIVEN_STEPS
    assert steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 1e-3
    assert steps[-1]["reward"] > 0
    assert all(step["grad_norm"] > 1 and abs(step["loss"]) > 0.1 for step in steps)
    assert all(step["steps/min_count"] < step["steps/max_count"] for step in steps)
    assert 0 < evaluation["eval_step_reward"] < 1


def test_the_model_is_that_of_one_process(of_two, of_one):
    moved = distance(of_one / "whole" / GIVEN, EMBEDDED_POLICY)
    gap = distance(of_two / "whole" / GIVEN, of_one / "whole" / GIVEN)
    print(f"moved by {moved:.2g}, differs by {gap / moved:.1e} of it")
    assert moved > 0.01
    assert gap < 1e-3 * moved


def test_a_killed_job_samples_on_as_if_it_had_not_been(of_two):
    whole, resumed = of_two / "whole", of_two / "resumed"
    shutil.copytree(whole / GIVEN, resumed / GIVEN)
    train_in_two(of_two, "resumed", "--resume_from_checkpoint", "true")
    assert log_history(resumed / LAST) == log_history(whole / LAST)
    assert_equal_weights(*(AutoModelForCausalLM.from_pretrained(folder) for folder in (whole, resumed)))
    assert distance(resumed, whole / GIVEN) > 1e-3
