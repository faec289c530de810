import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, maybe_apply_chat_template

from trl_grpo_ext.files import PartStore
from trl_grpo_ext.generation import load_vllm
from trl_grpo_ext.scripts import evaluate, label_steps
from trl_grpo_ext.tasks import EMBEDDED_POLICY, make_dataset

from ..distributed.test_two_processes import ROOT, launch
from ..tiny import save_tiny_model, tiny_model, tiny_tokenizer


QUICK = {evaluate: ["--num_problems", "1", "--num_samples", "0"], label_steps: ["--num_problems", "1"]}
SMALL = ["--num_problems", "6", "--num_samples", "4", "--problems_per_part", "2", "--max_new_tokens", "48"]


def completions_of(folder, model="word_problem_policy"):
    (of_model,) = folder.glob(f"*{model}*")
    return load_dataset(str(of_model / "word_problems"), split="test").to_list()


def test_two_models_are_compared_in_table_picture_and_json(tmp_path, capsys):
    tiny = save_tiny_model(tmp_path / "tiny")
    output = tmp_path / "evaluation"
    evaluate.run([*SMALL, "--baseline_name_or_path", tiny, "--output_dir", str(output)])
    results = json.loads((output / "results.json").read_text())["results"]
    policy, random_model = (metrics["word_problems"] for metrics in results.values())
    assert policy["greedy"]["value"] > 0.9
    assert random_model["greedy"]["value"] == 0
    assert random_model["truncated"] > 0 or random_model["unparsed"] > 0
    assert policy["maj@1"]["value"] <= policy["pass@4"]["value"]
    assert (output / "maj_and_pass.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "word_problem_policy" in table
    assert "tiny" in table
    assert len(completions_of(output)) == 6
    assert {len(row["samples"]) for row in completions_of(output)} == {4}


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_completions(tmp_path, monkeypatch):
    evaluate.run([*SMALL, "--output_dir", str(tmp_path / "whole")])
    write = PartStore.write

    def killed(self, part, rows):
        if part == 1:
            raise KeyboardInterrupt
        write(self, part, rows)

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate.run([*SMALL, "--output_dir", str(tmp_path / "killed")])
    assert len(completions_of(tmp_path / "killed")) == 2
    evaluate.run([*SMALL, "--output_dir", str(tmp_path / "killed")])
    assert completions_of(tmp_path / "killed") == completions_of(tmp_path / "whole")


def test_completions_of_other_settings_or_weights_are_not_taken_for_new_ones(tmp_path):
    tiny = save_tiny_model(tmp_path / "tiny")
    arguments = [*SMALL, "--num_samples", "0", "--model_name_or_path", tiny, "--output_dir", str(tmp_path / "output")]
    evaluate.run(arguments)
    evaluate.run(arguments)
    with pytest.raises(ValueError, match="holds what was made with other settings"):
        evaluate.run([*arguments, "--max_new_tokens", "12"])
    save_tiny_model(tmp_path / "tiny", seed=1)
    with pytest.raises(ValueError, match="holds what was made with other settings"):
        evaluate.run(arguments)


def test_local_files_are_benchmarks_too(tmp_path):
    benchmark = tmp_path / "mine"
    benchmark.mkdir()
    rows = [{"question": f"What is {n} + 1?", "golden": str(n + 1)} for n in range(3)]
    (benchmark / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate.run(
        [*SMALL, "--benchmarks", str(benchmark), "--instruction", "Think.", "--num_samples", "0",
         "--output_dir", str(tmp_path / "output")]
    )  # fmt: skip
    (file,) = (tmp_path / "output").glob("*/*--mine/*00000.parquet")
    assert "What is 0 + 1?\nThink." in load_dataset(str(file.parent), split="test")[0]["prompt"]
    assert not (tmp_path / "output" / "maj_and_pass.png").exists()
    (benchmark / "test.jsonl").write_text("".join(json.dumps({**row, "golden": "7"}) + "\n" for row in rows))
    with pytest.raises(ValueError, match="holds what was made with other settings"):
        evaluate.run(
            [*SMALL, "--benchmarks", str(benchmark), "--instruction", "Think.", "--num_samples", "0",
             "--output_dir", str(tmp_path / "output")]
        )  # fmt: skip


def test_two_processes_share_the_problems(tmp_path):
    launch(str(ROOT / "recipes" / "evaluate.py"), *SMALL, "--output_dir", str(tmp_path))
    (settings,) = tmp_path.glob("*/*/settings.json")
    assert json.loads(settings.read_text())["num_processes"] == 2
    assert [row["prompt"] for row in completions_of(tmp_path)] == [
        maybe_apply_chat_template({"prompt": prompt}, AutoTokenizer.from_pretrained(EMBEDDED_POLICY))["prompt"]
        for prompt in make_dataset(6, held_out=True, seed=1)["prompt"]
    ]


def test_vllm_generates_where_it_is_asked_to(tmp_path, monkeypatch):
    asked = fake_vllm(monkeypatch, text=r"\boxed{1}")
    evaluate.run([*SMALL, "--backend", "vllm", "--max_new_tokens", "5", "--output_dir", str(tmp_path)])
    assert [(params.temperature, params.max_tokens, count) for params, count in asked[:2]] == [
        (0.0, 5, 2),
        (0.7, 5, 8),
    ]
    (metrics,) = json.loads((tmp_path / "results.json").read_text())["results"].values()
    assert metrics["word_problems"]["truncated"] == 1.0
    assert metrics["word_problems"]["unparsed"] == 0.0


def test_vllm_labels_where_it_is_asked_to(tmp_path, monkeypatch):
    asked = fake_vllm(monkeypatch, text=r"\boxed{1}")
    label_steps.run(
        ["--num_problems", "2", "--num_solutions", "1", "--backend", "vllm", "--output_dir", str(tmp_path)]
    )
    assert [(params.temperature, params.max_tokens, count) for params, count in asked] == [(1.0, 64, 2)]
    assert load_dataset(str(tmp_path), split="train")["labels"] == [[0.0], [0.0]]


def test_vllm_refuses_an_adapter(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter; merge it into its base model first"):
        load_vllm(str(tmp_path / "adapter"), ModelConfig(), seed=0)


def fake_vllm(monkeypatch, text):
    """A vLLM that always writes this text; returns the list of what it is asked, with the number of prompts."""
    asked = []
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)

    class LLM:
        def __init__(self, **kwargs):
            assert kwargs["model"] == str(EMBEDDED_POLICY)

        def generate(self, prompts, params, use_tqdm):
            asked.append((params, len(prompts)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for _ in prompts]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **kwargs: SimpleNamespace(**kwargs)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return asked


@pytest.mark.parametrize(
    ("script", "field"),
    [
        (evaluate, "model_name_or_path"),
        (evaluate, "baseline_name_or_path"),
        (label_steps, "model_name_or_path"),
    ],
)
def test_what_is_no_whole_model_is_refused_by_name(tmp_path, script, field):
    without_tokenizer, without_weights = tmp_path / "model", tmp_path / "tokenizer"
    tiny_model(tiny_tokenizer()).save_pretrained(without_tokenizer)
    save_tiny_model(without_weights)
    (without_weights / "model.safetensors").unlink()
    for name, message in (
        (without_tokenizer, f"`{field}` is '.*', which has no tokenizer that can be loaded"),
        (tmp_path / "nothing", f"`{field}` is '.*', which is neither a folder with a model nor one"),
        (without_weights, "`model` is '.*', which is neither a folder with a model nor one .*safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            script.run([f"--{field}", str(name), "--output_dir", str(tmp_path / "output"), *QUICK[script]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks", "gsm9k"], "`benchmarks` names 'gsm9k', which is neither a file or folder here nor one of"),
        (["--temperature", "0"], "`temperature` is 0.0, but must be above 0"),
        (["--num_samples", "-1"], "`num_samples` is -1, but must be 0 or more"),
        (["--num_problems", "0"], "`num_problems` is 0, but must be 1 or more"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate.run(arguments)
