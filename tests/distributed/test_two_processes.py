import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ..objective.reference import numpy_process_advantages
from .prm_two_processes import trained_weights


ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def launch(*arguments, cwd=ROOT, launcher=TORCHRUN):
    command = [sys.executable, "-m", *launcher, *arguments]
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch("-m", "tests.distributed.two_processes", str(folder))
    return [json.loads((folder / f"process_{rank}.json").read_text()) for rank in range(2)]


def test_group_statistics_are_those_of_one_process(processes):
    for first, second in zip(processes[0]["batches"], processes[1]["batches"], strict=True):
        prompts = first["prompts"] + second["prompts"]
        assert all(len(set(prompts[start : start + 4])) == 1 for start in (0, 4, 8))  # groups, one on both processes
        step_ends = first["step_ends"] + second["step_ends"]
        expected = numpy_process_advantages(
            first["step_rewards"] + second["step_rewards"],
            step_ends,
            num_generations=4,
            length=max(ends[-1] for ends in step_ends) + 1,
        )
        assert np.abs(expected).max() > 0.5
        for row, advantages in zip(expected, first["advantages"] + second["advantages"], strict=True):
            np.testing.assert_allclose(advantages, row[: len(advantages)], rtol=1e-4, atol=1e-4)


def test_processes_end_with_the_same_weights_and_metrics(processes):
    assert processes[0]["checksum"] == processes[1]["checksum"]
    for first, second in zip(processes[0]["log"], processes[1]["log"], strict=True):
        for name in ("loss", "grad_norm", "step_reward", "step_reward_std", "steps/mean_count", "steps/max_count"):
            assert first.get(name) == second.get(name), name


def test_the_recipe_runs_on_two_processes(tmp_path):
    launch(
        str(ROOT / "recipes" / "deepseekmath.py"), "--max_steps", "2", "--per_device_train_batch_size", "12",
        "--per_device_eval_batch_size", "8", "--eval_steps", "1", "--num_eval_problems", "6", "--save_steps", "1",
        "--num_train_problems", "40", "--use_cpu", "true", "--output_dir", str(tmp_path / "output"), cwd=tmp_path,
    )  # fmt: skip
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    assert results["after"]["num_problems"] == 6
    state = json.loads((tmp_path / "output" / "checkpoint-2" / "trainer_state.json").read_text())
    # 2 processes x 12 completions a step, so 3 groups of 8, the second of them on both processes
    assert state["num_input_tokens_seen"] > 0


def test_a_prm_is_trained_as_by_one_process(tmp_path):
    launch("-m", "tests.distributed.prm_two_processes", str(tmp_path))
    of_two = torch.load(tmp_path / "weights.pt", weights_only=True)
    torch.testing.assert_close(of_two, trained_weights(tmp_path / "one"), rtol=1e-4, atol=1e-6)
