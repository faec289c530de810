"""Run by two gloo processes: a reference that FSDP2 has sharded over both is moved, saved and loaded."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_grpo_ext.iterative.reference import (
    add_reference_adapter,
    load_reference,
    reference_parameters,
    save_reference,
    update_reference,
)

from ..tiny import tiny_model, tiny_tokenizer
from . import leave


TOKENIZER = tiny_tokenizer()


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def whole(parameters):
    return {name: parameter.full_tensor().detach().clone() for name, parameter in parameters.items()}


def adapted():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(TOKENIZER), config)
    add_reference_adapter(model)
    return model


def check(policy, ref_model, names, file: Path, rank: int, fresh):
    """Moves, saves and loads; `names` maps a reference parameter to the policy's."""
    parameters = reference_parameters(policy, ref_model)
    assert parameters
    with torch.no_grad():
        for name in parameters:
            policy.get_parameter(names(name)).add_(1.0)
    live = {name: policy.get_parameter(names(name)).full_tensor().detach().clone() for name in parameters}
    before = whole(parameters)
    update_reference(policy, ref_model, share=0.25)
    for name, value in whole(parameters).items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * live[name])
    update_reference(policy, ref_model)
    for name, value in whole(parameters).items():
        assert torch.equal(value, live[name])
        assert not torch.equal(value, before[name])
    save_reference(parameters, file, should_write=rank == 0)
    torch.distributed.barrier()
    saved = load_file(file)
    assert saved.keys() == live.keys()
    assert all(torch.equal(saved[name], value) for name, value in live.items())
    other = reference_parameters(*fresh())
    load_reference(other, file)
    assert all(torch.equal(value, live[name]) for name, value in whole(other).items())


def main(folder: Path) -> None:
    state = Accelerator(cpu=True)  # by which TRL finds out that there is no DeepSpeed
    assert state.num_processes == 2
    rank = state.process_index
    models = [sharded(tiny_model(TOKENIZER, seed)) for seed in (0, 1)]
    fresh = lambda: (models[0], sharded(tiny_model(TOKENIZER, 2)))  # noqa: E731
    check(*models, lambda name: name, folder / "full.safetensors", rank, fresh)
    adapter_name = lambda name: name.replace(".ref.", ".default.")  # noqa: E731
    check(
        sharded(adapted()), None, adapter_name, folder / "lora.safetensors", rank, lambda: (sharded(adapted()), None)
    )
    (folder / f"done_{rank}").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    leave()
