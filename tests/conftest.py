import gc
import os


# One thread a process: several test processes share the cores, and oversubscribed threads are far slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from trl_grpo_ext import GRPOExtTrainer  # noqa: F401

from .tiny import tiny_model, tiny_tokenizer


torch.set_num_threads(1)
# Every end of a training collects garbage; without the imported modules that takes 2 ms instead of 200.
gc.freeze()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Also in jobs that would take all cores."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer)


@pytest.fixture
def free_passes(monkeypatch):
    """The models are so small that no further forward pass would pay."""
    monkeypatch.setattr("trl_grpo_ext.batching.PASS_TOKENS", 0)
