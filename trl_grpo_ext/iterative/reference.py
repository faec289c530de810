"""The reference policy of Algorithm 1: set to the live policy when an iteration starts, kept in checkpoints."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from trl.trainer.callbacks import SyncRefModelCallback


POLICY_ADAPTER = "default"
REFERENCE_ADAPTER = "ref"  # the name under which TRL looks for it


def add_reference_adapter(model: Any) -> None:
    """
    Give a PEFT policy a frozen copy of its adapter, by which it is its own reference.

    Args:
        model ([`~peft.PeftModel`]):
            The policy, on any base, quantized or not. A reference adapter that it has is kept.

    Raises:
        `ValueError`: if the adapter is of a kind of which a model takes one only.
    """
    if REFERENCE_ADAPTER not in model.peft_config:
        try:
            model.add_adapter(REFERENCE_ADAPTER, model.peft_config[POLICY_ADAPTER])
        except ValueError as error:
            raise ValueError(
                f"`peft_config` is a {type(model.peft_config[POLICY_ADAPTER]).__name__} of which a model takes no "
                f"second one as its reference ({error}); use reference_update='none'."
            ) from error
        model.set_adapter(POLICY_ADAPTER)
        for policy, reference in zip(*adapter_parameters(model), strict=True):
            reference.data = reference.data.to(policy.dtype)  # else the same weights would give other numbers
        copy_parameters(*adapter_parameters(model))
    for parameter in adapter_parameters(model)[1]:
        parameter.requires_grad_(False)


def adapter_parameters(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of policy and reference adapter, in one order."""
    policy, reference = [], []
    for name, parameter in model.named_parameters():
        if f".{POLICY_ADAPTER}." in name:
            policy.append(parameter)
            reference.append(model.get_parameter(name.replace(f".{POLICY_ADAPTER}.", f".{REFERENCE_ADAPTER}.")))
    return policy, reference


def copy_parameters(source: Iterable[nn.Parameter], target: Iterable[nn.Parameter], share: float = 1.0) -> None:
    """Move parameters towards others, `target := (1 - share) * target + share * source`, sharded (ZeRO-3) ones too."""
    # TRL's, which asks for models, knows how to gather what DeepSpeed has sharded
    SyncRefModelCallback.sync_target_model(Parameters(source), Parameters(target), share)


class Parameters:
    """Some parameters, as a model gives its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._parameters = list(parameters)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


def update_reference(policy: Any, ref_model: Any, share: float = 1.0) -> None:
    """
    Move the reference towards the live policy.

    Args:
        policy (`nn.Module`):
            The policy, unwrapped. With PEFT its own reference adapter is moved, and nothing else of it.
        ref_model (`nn.Module`, *optional*):
            The reference, sharded like the policy; `None` with PEFT.
        share (`float`, *optional*, defaults to `1.0`):
            1 sets it to the policy (Algorithm 1), less is a moving average.
    """
    if is_peft_model(policy):
        copy_parameters(*adapter_parameters(policy), share)
    else:
        copy_parameters(policy.parameters(), ref_model.parameters(), share)


def reference_parameters(policy: Any, ref_model: Any) -> dict[str, nn.Parameter]:
    """The reference's parameters by name: of its adapter, of its own model, or none where the base model serves."""
    if is_peft_model(policy):
        return {name: p for name, p in policy.named_parameters() if f".{REFERENCE_ADAPTER}." in name}
    return {} if ref_model is None else dict(ref_model.named_parameters())


def save_reference(parameters: dict[str, nn.Parameter], file: Path, should_write: bool) -> None:
    """
    Write a reference's whole weights. Called on all processes, since a part of the weights may lie on each.

    Args:
        parameters (`dict[str, nn.Parameter]`):
            [`reference_parameters`].
        file (`Path`):
            Where to.
        should_write (`bool`):
            Whether this process writes.
    """
    state = {name: whole_tensor(parameter) for name, parameter in parameters.items()}
    if should_write and state:
        save_file(state, file)


@torch.no_grad()
def load_reference(parameters: dict[str, nn.Parameter], file: Path) -> None:
    """Set a reference, sharded or not, to weights that [`save_reference`] wrote."""
    state = load_file(file) if parameters else {}
    for name, parameter in parameters.items():
        value = state[name].to(parameter.device)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        with gathered(parameter, writes=True):
            parameter.copy_(value)


def whole_tensor(parameter: nn.Parameter) -> torch.Tensor:
    """A copy of a parameter in main memory, of all its shards."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().cpu()
    with gathered(parameter, writes=False):
        return parameter.detach().to("cpu", copy=True).contiguous()


def gathered(parameter: nn.Parameter, writes: bool) -> AbstractContextManager:
    """Within it a parameter is whole, also one that DeepSpeed's ZeRO-3 has sharded."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if writes else None)
