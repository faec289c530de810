import datasets
import pytest

from trl_grpo_ext.iterative.rollouts import RolloutStore

from .helpers import rollout


MESSAGES = [{"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize("prompt", ["1 + 1?", MESSAGES])
def test_what_was_stored_is_read_back(tmp_path, prompt):
    store = RolloutStore(tmp_path / "rollouts", capacity=10)
    first = [rollout(prompt, step_rewards=[None], reward=None, verified=None, solution=None)]
    second = [rollout(prompt, "3", 0.0, step_labels=[0.5], policy_step=1), rollout(prompt, "ки\n", policy_step=1)]
    store.add(first, 0)
    store.add(second, 1)
    assert store.load() == first + second


def test_datasets_reads_files_of_which_some_lack_all_values(tmp_path):
    store = RolloutStore(tmp_path / "rollouts", capacity=10)
    store.add([rollout(reward=None, solution=None, steps=[], step_ends=[], step_rewards=[])], 0)
    store.add([rollout()], 1)
    rows = datasets.load_dataset(str(tmp_path / "rollouts"), split="train")
    assert rows["reward"][:] == [None, 0.25]
    assert rows["solution"][:] == [None, "2"]


def test_the_newest_are_kept(tmp_path):
    store = RolloutStore(tmp_path, capacity=3)
    for step in range(4):
        store.add([rollout(completion=f"{step}a", policy_step=step), rollout(completion=f"{step}b")], step)
    assert [r.completion for r in store.load()] == ["2b", "3a", "3b"]
    store.prune()
    assert len(store.files()) == 2
    assert [r.completion for r in store.load()] == ["2b", "3a", "3b"]


def test_several_batches_of_one_step_are_kept_apart(tmp_path):
    store = RolloutStore(tmp_path, capacity=10)
    store.add([rollout(completion="a")], 7)
    store.add([rollout(completion="b")], 7)
    assert [r.completion for r in store.load()] == ["a", "b"]


def test_a_resumed_run_drops_what_it_samples_again(tmp_path):
    store = RolloutStore(tmp_path, capacity=10)
    for step in (0, 1, 9, 10):
        store.add([rollout(completion=str(step))], step)
    store.drop_from(9)
    assert [r.completion for r in store.load()] == ["0", "1"]


def test_an_unfinished_file_is_not_read(tmp_path):
    store = RolloutStore(tmp_path, capacity=10)
    store.add([rollout(completion="a")], 0)
    (tmp_path / "step-0000001-000.unfinished").write_bytes(b"PAR1")
    assert [r.completion for r in store.load()] == ["a"]
    assert len(datasets.load_dataset(str(tmp_path), split="train")) == 1


def test_another_runs_rollouts_are_renamed_not_deleted(tmp_path):
    store = RolloutStore(tmp_path / "rollouts", capacity=10)
    assert store.set_aside() is None
    for number in (1, 2):
        store.add([rollout(completion=str(number))], 0)
        assert store.set_aside() == tmp_path / f"rollouts-{number}"
    assert store.load() == []
    assert [r.completion for r in RolloutStore(tmp_path / "rollouts-1", 10).load()] == ["1"]
