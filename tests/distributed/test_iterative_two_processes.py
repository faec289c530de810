"""Two gloo processes decide and end as one process with the same global batch."""

import json

import pytest
import torch

from .iterative_two_processes import CASES, train
from .test_two_processes import launch


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for case in CASES:
        (folder / case).mkdir()
    launch("-m", "tests.distributed.iterative_two_processes", str(folder))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_weights_and_rollouts_are_those_of_one_process(tmp_path, of_two_processes, case):
    first, second = (torch.load(of_two_processes / f"process_{rank}.pt", weights_only=True)[case] for rank in (0, 1))
    alone = train(tmp_path, case)
    start = train_nothing(tmp_path, case)
    assert all(torch.equal(first[name], second[name]) for name in alone)
    for part in ("policy", "reference", "reward model"):
        names = [name for name in alone if name.startswith(part)]
        moved = torch.cat([(alone[name] - start[name]).flatten() for name in names])
        gap = torch.cat([(first[name] - alone[name]).flatten() for name in names])
        error = (gap.norm() / moved.norm()).item()
        print(case, part, f"moved by {moved.norm():.2g}, differs by {error:.1e} of it")
        assert moved.norm() > 0.01
        assert error < 1e-3  # Adam takes the sign of gradients that are rounding noise
    ours = json.loads((of_two_processes / case / "rollouts.json").read_text())
    theirs = json.loads((tmp_path / "rollouts.json").read_text())
    for field in ("prompt", "completion_ids", "verified", "step_labels", "iteration", "policy_step"):
        assert [row[field] for row in ours] == [row[field] for row in theirs], field


def train_nothing(tmp_path, case):
    CASES["unmoved"] = {**CASES[case], "learning_rate": 0.0, "reward_model_learning_rate": 1e-30}
    try:
        return train(tmp_path / "unmoved", "unmoved")
    finally:
        del CASES["unmoved"]


def test_both_processes_have_the_same_labels(of_two_processes):
    first, second = (json.loads((of_two_processes / f"labels_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    labelled = [labels for labels in first if labels]
    assert len(labelled) == 6  # five asked for, shared out over two generation batches
    assert all(label in (0, 1 / 3, 2 / 3, 1) for labels in labelled for label in labels)


def test_a_reference_that_fsdp2_has_sharded_is_moved_saved_and_loaded(tmp_path):
    launch("-m", "tests.distributed.sharded_reference", str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("done_*")) == ["done_0", "done_1"]
