import json

import pytest

from .test_two_processes import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    launch("-m", "tests.distributed.dynamic_sampling_two_processes", str(folder))
    return folder


@pytest.fixture(scope="module")
def processes(folder):
    return [json.loads((folder / f"process_{rank}.json").read_text()) for rank in range(2)]


def test_every_group_of_both_processes_is_live_and_whole(processes):
    for first, second in zip(processes[0]["batches"], processes[1]["batches"], strict=True):
        assert first["live"] == second["live"] == [True] * 4
        assert first["num_items"] == second["num_items"] == first["tokens"] + second["tokens"]
        for prompts in (first["prompts"], second["prompts"]):
            assert all(prompts[start : start + 4] == [prompts[start]] * 4 for start in range(0, 16, 4))


def test_both_take_the_same_decisions_and_end_with_the_same_weights(processes):
    steps = [[row for row in process["log"] if "dynamic_sampling/rounds" in row] for process in processes]
    assert [row["dynamic_sampling/rounds"] for row in steps[0]] == [row["dynamic_sampling/rounds"] for row in steps[1]]
    # The first process lacks none, so what it samples meanwhile waits; of 4 that wait it drops none but the oldest
    assert all(row["dynamic_sampling/refilled"] == 4 for row in steps[0])
    assert all(row["dynamic_sampling/left"] == 0 for row in steps[0])
    assert steps[0][0]["dynamic_sampling/kept"] >= 4
    assert processes[0]["checksum"] == processes[1]["checksum"]


def test_each_process_keeps_what_it_had_left_over(folder):
    files = sorted(file.name for file in (folder / "output" / "checkpoint-3" / "dynamic_sampling").iterdir())
    assert files == ["state.json", "surplus-000.safetensors", "surplus-001.safetensors"]
