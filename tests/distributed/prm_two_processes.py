"""Run by two gloo processes: a PRM trained for a step on eight rows, of unequal numbers of steps, four on each."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from ..trainers.test_prm_trainer import make
from . import leave


def trained_weights(folder: Path) -> torch.Tensor:
    trainer = make(
        folder, per_device_train_batch_size=8 // PartialState().num_processes, max_steps=1, optim="sgd",
        learning_rate=0.5, max_grad_norm=0.0,
    )  # fmt: skip
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    weights = trained_weights(Path(sys.argv[1]))
    if state.is_main_process:
        torch.save(weights, Path(sys.argv[1]) / "weights.pt")
    leave()
