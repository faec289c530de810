"""ZeRO-2, ZeRO-3 and FSDP2, by the recipes' own files: two gloo processes end as two that hold whole models."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from .sharded_training import CASES
from .test_two_processes import ROOT, TORCHRUN, launch


def results_of(folder, launcher=TORCHRUN):
    """What each of two processes has after its trainings in this folder."""
    launch("-m", "tests.distributed.sharded_training", str(folder), launcher=launcher)
    return [torch.load(folder / f"process_{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(scope="module", params=["zero2", "zero3", "fsdp2"])
def sharded(request, tmp_path_factory):
    """The folder that a recipe's processes have trained in, and what each has."""
    if request.param != "fsdp2":
        pytest.importorskip("deepspeed", reason="ZeRO needs DeepSpeed: install the extra `deepspeed`")
    config = ROOT / "recipes" / "accelerate_configs" / f"{request.param}.yaml"
    folder = tmp_path_factory.mktemp(request.param)
    options = ("--config_file", str(config), "--num_processes", "2", "--main_process_port", "0")
    return folder, results_of(folder, ("accelerate.commands.launch", *options, "--mixed_precision", "no"))


def flat(weights):
    return torch.cat([weight.flatten() for weight in weights.values()])


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_whole_models_also_after_a_resume(whole, sharded, case):
    first, second = (results[case] for results in sharded[1])
    moved = flat(whole[case]["weights"]) - flat(whole[case]["start"])
    for part in ("weights", "resumed"):
        assert all(torch.equal(value, second[part][name]) for name, value in first[part].items())
        error = ((flat(first[part]) - flat(whole[case]["weights"])).norm() / moved.norm()).item()
        print(case, part, f"moved by {moved.norm():.2g}, differs by {error:.1e} of it")
        assert error < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_policy_after_each_update(sharded, case):
    results = sharded[1][0][case]
    assert len(results["gaps"]) == 3
    assert all(after == 0 for _, after in results["gaps"])
    assert all(before > 1e-5 for before, _ in results["gaps"][1:])
    kl = [entry["kl"] for entry in results["log"] if "kl" in entry]
    print(case, "KL", kl)
    assert kl[0] == kl[2] == 0
    assert min(kl[1], kl[3]) > 0


def test_a_saved_model_is_loaded_whole(sharded):
    folder, (results, _) = sharded
    full = AutoModelForCausalLM.from_pretrained(folder / "full" / "saved")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = PeftModel.from_pretrained(base, folder / "lora" / "saved")
    for model, case in ((full, "full"), (adapted, "lora")):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, results[case]["weights"][name]), name


def test_sampled_completions_and_losses_are_those_of_whole_models(whole, sharded):
    logs = [[entry for entry in log if "kl" in entry] for log in (sharded[1][0]["sampled"], whole["sampled"])]
    assert len(logs[0]) == 3
    for ours, theirs in zip(*logs, strict=True):
        for name in ("loss", "kl", "step_reward", "grad_norm", "completions/mean_length"):
            print(name, ours[name], theirs[name])
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_the_recipe_evaluates_a_sharded_policy(sharded):
    results = json.loads((sharded[0] / "recipe" / "results.json").read_text())
    assert results["before"]["num_problems"] == results["after"]["num_problems"] == 3
