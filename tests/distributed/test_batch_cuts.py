"""For given completions the gradient is the same however they are cut into batches."""

import pytest
import torch

from trl_grpo_ext.objective.loss import GLOBAL_TOKEN_LOSSES

from ..tiny import save_tiny_model
from .batch_cuts import CASES, CUTS, gradient
from .test_two_processes import launch


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuts")
    launch("-m", "tests.distributed.batch_cuts", str(folder))
    return torch.load(folder / "gradients.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_gradient_does_not_depend_on_the_cut(tmp_path, of_two_processes, name):
    model_path = save_tiny_model(tmp_path / "model")
    whole = gradient(tmp_path / "whole", model_path, CASES[name], (1, 1))
    assert whole.norm() > 1e-3
    for cut in CUTS:
        for ours in (gradient(tmp_path / "cut", model_path, CASES[name], cut), of_two_processes[name, cut]):
            error = ((ours - whole).norm() / whole.norm()).item()
            print(name, cut, f"{error:.1e}")
            assert error < 1e-4, cut


@pytest.mark.parametrize("loss_type", GLOBAL_TOKEN_LOSSES)
def test_without_pooling_tokens_of_a_short_generation_batch_weigh_more(tmp_path, loss_type):
    model_path = save_tiny_model(tmp_path / "model")
    options = {"loss_type": loss_type, "pool_generation_batches": False}
    whole = gradient(tmp_path / "whole", model_path, options, (1, 1))
    cut = gradient(tmp_path / "cut", model_path, options, (4, 2))
    assert (cut - whole).norm() > 0.01 * whole.norm()
