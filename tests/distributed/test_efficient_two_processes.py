"""What saves work changes no number on two processes either, each of which makes the forward passes that it needs."""

import json

import pytest

from .efficient_two_processes import CASES
from .test_two_processes import launch


WHOLE = (
    "gradient checkpointing",
    "buffers that are broadcast",
    "a static graph",
    "parameters that may go unused",
)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("efficient")
    launch("-m", "tests.distributed.efficient_two_processes", str(folder))
    return [json.loads((folder / f"process_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(processes, name):
    for process in processes:
        assert process[name]["difference"] is None
        assert process[name]["shares_prompts"] is (None if name in WHOLE else True)


def test_processes_need_other_numbers_of_passes(processes):
    assert processes[0]["outcome"]["share_without_advantage"] == 0.5
