"""What is pushed of adapters and of a reward model that was trained along, and what a failed push leaves."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from trl_grpo_ext import ProcessRewardModel
from trl_grpo_ext.iterative.outcome_reward_model import OutcomeRewardModel

from .hub_server import HubServer
from .test_deepseekmath import ROOT


def environment(hub):
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_none",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    with HubServer() as hub:
        command = [sys.executable, "-m", "tests.scripts.push_jobs", str(folder)]
        result = subprocess.run(command, cwd=ROOT, env=environment(hub), capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, (result.stderr[-3000:], hub.requests)
    return hub.repos, folder


def write(repo, folder):
    for name, content in repo.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_an_iterative_run_pushes_policy_and_reward_model(pushed, tmp_path):
    repos, folder = pushed
    repo = repos["tester/iterative"]
    assert repo.private
    expected = {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"}
    assert expected | {f"reward_model/{name}" for name in ("model.safetensors", "config.json", "README.md")} <= set(
        repo.files
    )
    AutoModelForCausalLM.from_pretrained(write(repo, tmp_path))
    ours, theirs = (OutcomeRewardModel(path / "reward_model") for path in (folder / "iterative" / "output", tmp_path))
    assert ours(["Count 1:"], ["1\n2"]) == theirs(["Count 1:"], ["1\n2"])
    assert "`reward_model/`" in repo.files["README.md"].decode()


def test_a_process_reward_model_of_adapters_is_pushed(pushed, tmp_path):
    repos, folder = pushed
    repo = repos["tester/prm"]
    assert not repo.private
    ours, theirs = (ProcessRewardModel(path) for path in (folder / "prm", write(repo, tmp_path)))
    assert ours.score(["1 + 1?"], [["1 + 1 = 2", "2"]]) == theirs.score(["1 + 1?"], [["1 + 1 = 2", "2"]])
    card = ModelCard(repo.files["README.md"].decode())
    assert {"trl_grpo_ext", "prm", "lora"} <= set(card.data.tags)


@pytest.mark.parametrize("name", ["tester/iterative", "tester/prm"])
def test_nothing_else_is_pushed(pushed, name):
    repos, folder = pushed
    files = repos[name].files
    for path, content in files.items():
        assert not path.startswith(("checkpoint-", "_", "ref/", "reward/")), path
        assert "optimizer" not in path
        assert b"hf_none" not in content, path
    cards = [content.decode() for path, content in files.items() if path.endswith("README.md")]
    assert len(cards) == (2 if name == "tester/iterative" else 1)
    for card in cards:
        data = ModelCard(card).data  # whose header parses
        assert data.base_model is None
        assert "trl_grpo_ext" in data.tags
        assert str(ROOT) not in card
        assert str(folder) not in card
        assert "None" not in card.split("### Framework versions")[0]


@pytest.mark.parametrize(("name", "cause"), [("broken", "500"), ("gone", "refused")])
def test_a_failed_push_leaves_all_in_place_and_says_how_to_go_on(pushed, name, cause):
    _, folder = pushed
    message = (folder / f"{name}.txt").read_text()
    assert cause in message
    assert "\n" not in message
    assert "hf_none" not in message
    command = shlex.split(re.search(r"`(hf upload .*)`", message)[1])
    with HubServer() as hub:
        # Under another name: those of the failing ones fail here, too
        command[command.index(f"tester/{name}")] = "tester/again"
        subprocess.run(command, env=environment(hub), check=True, capture_output=True, timeout=60)
    repo = hub.repos["tester/again"]
    assert repo.private
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "results.json"} <= set(repo.files)
    for path, content in repo.files.items():
        assert content == (folder / name / path).read_bytes()
