import json

import datasets
import pytest
from transformers import AutoModel, AutoModelForCausalLM

from trl_grpo_ext import ProcessRewardModel
from trl_grpo_ext.iterative.outcome_reward_model import OutcomeRewardModel
from trl_grpo_ext.scripts import iterative_grpo
from trl_grpo_ext.tasks import EMBEDDED_JUDGE, EMBEDDED_POLICY


SMALL = [
    "--num_tutored_problems", "8", "--steps_per_rl_iteration", "2", "--per_device_train_batch_size", "16",
    "--num_train_problems", "40", "--num_eval_problems", "8", "--num_eval_samples", "2", "--eval_steps", "2",
    "--per_device_eval_batch_size", "16", "--save_steps", "1", "--logging_steps", "1", "--cpu_threads", "1",
    "--reward_eval_share", "0.3",
]  # fmt: skip


def run(folder, *arguments):
    iterative_grpo.run([*SMALL, "--output_dir", str(folder), *arguments])
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def outcome_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("iterative") / "output"
    return folder, run(folder)


def log_history(folder):
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def test_two_iterations_end_in_a_report(outcome_run):
    folder, results = outcome_run
    assert results["config"]["num_rl_iterations"] == 2
    assert 0 <= results["after"]["greedy"] <= 1
    assert (folder / "training.png").exists()
    history = log_history(folder)
    assert sum("reward_model/num_examples" in entry for entry in history) == 2
    assert any("eval_verified_accuracy" in entry for entry in history)
    assert history[0]["kl"] == 0


def test_what_it_leaves_behind_can_be_used(outcome_run):
    folder, _ = outcome_run
    AutoModelForCausalLM.from_pretrained(folder)
    first, last = (OutcomeRewardModel(folder / name) for name in ("_first_reward_model", "reward_model"))
    prompts = [[{"role": "user", "content": "Mia has 2 cards. Mia buys 3 more."}]]
    completions = [[{"role": "assistant", "content": "2 + 3 = 5"}]]
    assert first(prompts, completions) != last(prompts, completions)
    assert len(datasets.load_dataset(str(folder / "_rollouts"), split="train")) == 4 * 16


def test_it_resumes(outcome_run, capfd):
    folder, results = outcome_run
    again = run(folder, "--resume_from_checkpoint", "true")
    assert again["after"] == results["after"]
    assert "Making the first reward model" not in capfd.readouterr().out


@pytest.mark.parametrize("step_verifier", [["--step_verifier", "working_reward"], []])
def test_a_process_reward_model_learns_along(tmp_path, step_verifier):
    folder = tmp_path / "output"
    run(
        folder, "--supervision", "process", "--reward_update", "process", "--label_continuations", "2",
        "--label_completions", "4", *step_verifier,
    )  # fmt: skip
    assert any(entry.get("reward_model/num_examples", 0) > 0 for entry in log_history(folder))
    assert len(ProcessRewardModel(folder / "reward_model").score(["1 + 1?"], [["1 + 1 = 2"]])[0]) == 1


def test_a_data_set_needs_a_reward_model(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}))
    with pytest.raises(ValueError, match="`reward_model_name_or_path` is missing"):
        iterative_grpo.run(
            ["--dataset_name", str(file), "--model_name_or_path", str(EMBEDDED_POLICY), "--output_dir",
             str(tmp_path / "out"), "--use_cpu", "true", "--bf16", "false"]
        )  # fmt: skip


def test_the_judge_is_the_policy_with_layers_on_top():
    judge = AutoModel.from_pretrained(EMBEDDED_JUDGE).state_dict()
    policy = AutoModel.from_pretrained(EMBEDDED_POLICY).state_dict()
    for name, value in policy.items():
        assert name == "norm.weight" or (judge[name] == value).all(), name
    new = {name.split(".")[1] for name in judge if name.startswith("layers.")} - {"0", "1", "2"}
    assert new == {"3", "4"}
