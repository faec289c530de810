"""`--push_to_hub` against a server on this machine that speaks the endpoints a push calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from .hub_server import HubServer
from .test_deepseekmath import ROOT, SMALL


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    with HubServer() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [
                sys.executable, str(ROOT / "recipes" / "deepseekmath.py"), *SMALL, "--output_dir", "output",
                "--num_eval_problems", "0", "--save_steps", "100", "--push_to_hub", "true",
                "--hub_model_id", "tester/pushed", "--hub_token", "hf_none", "--hub_private_repo", "true",
            ],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, (result.stderr[-3000:], hub.requests)
    return hub.repos["tester/pushed"], folder / "output"


def test_model_tokenizer_card_and_results_are_pushed(pushed):
    repo, output_dir = pushed
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md", "results.json", "training.png"):
        assert repo.files[name] == (output_dir / name).read_bytes()
    assert repo.private


def test_nothing_of_this_machine_is_pushed(pushed):
    repo, _ = pushed
    assert not [name for name in repo.files if name.startswith("checkpoint-") or "optimizer" in name]
    for name, content in repo.files.items():
        assert b"hf_none" not in content, name
    card = ModelCard(repo.files["README.md"].decode())
    assert card.data.base_model is None
    for name in ("README.md", "results.json", "config.json"):
        assert str(ROOT).encode() not in repo.files[name], name
        assert str(Path.home()).encode() + b"/" not in repo.files[name], name
