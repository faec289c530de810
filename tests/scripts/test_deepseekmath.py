import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from trl_grpo_ext.scripts import deepseekmath

from ..tiny import save_tiny_model


ROOT = Path(__file__).parents[2]
# The default job with less of everything
SMALL = [
    "--max_steps", "2", "--per_device_train_batch_size", "16", "--per_device_eval_batch_size", "16",
    "--eval_steps", "1", "--logging_steps", "1", "--num_train_problems", "50", "--num_eval_problems", "8",
    "--use_cpu", "true", "--cpu_threads", "1",
]  # fmt: skip


@pytest.fixture
def gsm8k_file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(8)))
    return str(path)


class TestDefaultJob:
    @pytest.fixture(scope="class")
    def output_dir(self, tmp_path_factory):
        output_dir = tmp_path_factory.mktemp("job") / "output"
        deepseekmath.run([*SMALL, "--output_dir", str(output_dir)])
        return output_dir

    def test_writes_results(self, output_dir):
        results = json.loads((output_dir / "results.json").read_text())
        for when in ("before", "after"):
            assert set(results[when]) == {"greedy", "pass@1", "maj@8", "pass@8", "num_problems"}
            assert all(0 <= results[when][name] <= 1 for name in ("greedy", "pass@1", "maj@8", "pass@8"))
        assert results["seconds"] > 0
        assert results["config"]["supervision"] == "process"
        assert results["config"]["beta"] == 0.04

    def test_saves_a_model_that_loads_and_differs_from_the_start(self, output_dir):
        trained = AutoModelForCausalLM.from_pretrained(output_dir)
        start = AutoModelForCausalLM.from_pretrained(deepseekmath.EMBEDDED_POLICY)
        assert any((a != b).any() for a, b in zip(trained.parameters(), start.parameters(), strict=True))
        tokenizer = AutoTokenizer.from_pretrained(output_dir)
        assert tokenizer.chat_template == AutoTokenizer.from_pretrained(deepseekmath.EMBEDDED_POLICY).chat_template

    def test_draws_a_picture(self, output_dir):
        assert (output_dir / "training.png").read_bytes().startswith(b"\x89PNG")

    def test_model_card_names_method_paper_base_data_and_settings(self, output_dir):
        card = ModelCard.load(output_dir / "README.md")
        assert "trl_grpo_ext" in card.data.tags
        for text in (
            "GRPO with process supervision (section 4.1.3)",
            "papers/2402.03300",
            "Base model: word_problem_policy",
            "Data: word problems made by",
            "| `beta` | `0.04` |",
            "| `loss_type` | `'grpo'` |",
        ):
            assert text in card.text
        assert "None" not in card.text.split("### Framework versions")[0]
        assert str(deepseekmath.EMBEDDED_POLICY) not in card.content

    def test_the_other_arm(self, tmp_path):
        deepseekmath.run([*SMALL, "--supervision", "outcome", "--output_dir", str(tmp_path / "output")])
        results = json.loads((tmp_path / "output" / "results.json").read_text())
        assert results["config"]["supervision"] == "outcome"


def test_takes_a_process_reward_model_by_its_folder(tmp_path):
    folder = str(tmp_path / "prm")
    AutoModelForTokenClassification.from_pretrained(deepseekmath.EMBEDDED_POLICY).save_pretrained(folder)
    AutoTokenizer.from_pretrained(deepseekmath.EMBEDDED_POLICY).save_pretrained(folder)
    output_dir = tmp_path / "output"
    deepseekmath.run(
        [*SMALL, "--num_eval_problems", "0", "--step_reward_funcs", folder, "--output_dir", str(output_dir)]
    )
    logs = json.loads((output_dir / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert 0 < logs[0]["step_rewards/prm/mean"] < 1


def test_a_killed_job_goes_on_from_its_checkpoint(tmp_path):
    output_dir = tmp_path / "output"
    arguments = [*SMALL, "--num_eval_problems", "0", "--save_steps", "1", "--output_dir", str(output_dir)]
    deepseekmath.run([*arguments, "--max_steps", "1"])
    first = json.loads((output_dir / "checkpoint-1" / "trainer_state.json").read_text())
    deepseekmath.run([*arguments, "--max_steps", "2", "--resume_from_checkpoint", "true"])
    second = json.loads((output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    assert (first["global_step"], second["global_step"]) == (1, 2)
    assert second["log_history"][: len(first["log_history"]) - 1] == first["log_history"][:-1]


def test_default_config_is_the_papers_setting_where_the_paper_gives_one():
    config = yaml.safe_load(deepseekmath.DEFAULT_CONFIG.read_text())
    expected = {
        "supervision": "process", "beta": 0.04, "loss_type": "grpo", "use_bias_correction_kl": False,
        "num_iterations": 1, "epsilon": 0.2, "temperature": 1.0,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


def test_a_real_recipe_with_model_data_and_config(tmp_path, gsm8k_file):
    model_path = save_tiny_model(tmp_path / "model")
    config = tmp_path / "config.yaml"
    settings = {
        "supervision": "process", "step_reward_funcs": "my_rewards.even_length", "step_separator": "[aeiou]",
        "step_separator_is_regex": True, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 1,
        "max_completion_length": 16, "bf16": False, "report_to": "none", "num_eval_problems": 0, "use_cpu": True,
        "instruction": "Count.", "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings))
    (tmp_path / "my_rewards.py").write_text(
        "def even_length(steps, **kwargs):\n    return [[float(len(s) % 2) for s in steps_of] for steps_of in steps]\n"
    )
    arguments = ["--config", str(config), "--model_name_or_path", model_path, "--dataset_name", gsm8k_file]
    subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "deepseekmath.py"), *arguments, "--output_dir", "output"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert (tmp_path / "output" / "adapter_model.safetensors").exists()
    card = ModelCard.load(tmp_path / "output" / "README.md")
    assert "Data: train.jsonl" in card.text
    assert "Base model: model" in card.text
    assert str(tmp_path) not in card.content
    assert json.loads((tmp_path / "output" / "results.json").read_text())["before"] is None


def test_rewards_of_form_and_length_are_there_by_name(tmp_path):
    step_rewards = ["working_reward", "step_overlong_punishment"]
    rewards = ["answer_reward", "format_reward", "soft_overlong_punishment", "cosine_scaled_reward"]
    deepseekmath.run(
        [*SMALL, "--config", str(deepseekmath.DEFAULT_CONFIG), "--reward_funcs", *rewards,
         "--step_reward_funcs", *step_rewards, "--max_completion_length", "64", "--soft_punish_cache", "60",
         "--output_dir", str(tmp_path)]
    )  # fmt: skip
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["rewards/format_reward/mean"] > 0
    assert history[0]["rewards/soft_overlong_punishment_reward/mean"] < 0
    assert history[0]["step_rewards/step_overlong_punishment/mean"] < 0
    assert 0 <= history[0]["answer/unparsed"] < 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model_name_or_path", "./nope"], r"`model_name_or_path` is './nope', which is neither a folder"),
            (["--dataset_name", "nope.jsonl"], r"`dataset_name` is 'nope.jsonl', but there is no such file"),
            (["--reward_funcs", "nope"], r"There is no reward function 'nope'"),
            (["--reward_funcs", "math.nope"], r"There is no reward function 'math.nope'"),
            (["--supervision", "process"], r"`step_reward_funcs` is missing"),
            (["--step_reward_funcs", "math.pi"], r"There is no reward function 'math.pi': it is 3.14"),
            (["--resume_from_checkpoint", "true"], r"`resume_from_checkpoint` is 'true', but there is no such"),
            (["--num_eval_samples", "0"], r"`num_eval_samples` is 0, but must be 1 or more"),
            (["--soft_punish_cache", "999"], r"`soft_punish_cache` is 999, but must be at most `max_completion_len"),
            (["--num_train_problems", "0"], r"`num_train_problems` is 0, but must be 1 or more"),
        ],
    )
    def test_is_one_clear_error_before_anything_is_written(self, tmp_path, arguments, message):
        model_path = save_tiny_model(tmp_path / "model")
        output_dir = tmp_path / "output"
        defaults = ["--model_name_or_path", model_path, "--bf16", "false", "--output_dir", str(output_dir)]
        with pytest.raises(ValueError, match=message):
            deepseekmath.run([*defaults, *SMALL, *arguments])
        assert not output_dir.exists()

    def test_an_output_directory_that_is_a_file_is_left_alone(self, tmp_path):
        file = tmp_path / "output"
        file.write_text("mine")
        for output_dir in (file, file / "below"):
            with pytest.raises(ValueError, match=r"`output_dir` is '.*output.*', but '.*output' is a file"):
                deepseekmath.run([*SMALL, "--output_dir", str(output_dir)])
        assert file.read_text() == "mine"

    def test_an_unknown_key_in_the_config_is_refused(self, tmp_path):
        config = tmp_path / "config.yaml"
        config.write_text("supervison: process\nbf16: false\n")
        with pytest.raises(ValueError, match="supervison"):
            deepseekmath.run(["--config", str(config)])

    def test_an_unknown_argument_is_refused(self):
        with pytest.raises((ValueError, SystemExit)):
            deepseekmath.run(["--supervison", "process"])


def test_resumes_from_the_last_checkpoint_that_was_written_to_its_end(tmp_path):
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"global'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert deepseekmath.find_checkpoint("true", tmp_path) == str(tmp_path / "checkpoint-10")
