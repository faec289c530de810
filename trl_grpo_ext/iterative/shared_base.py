"""One base model for policy, reference and reward model: an adapter each, and a score head."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import cached_file, find_adapter_config_file
from trl.trainer.utils import use_adapter


REWARD_ADAPTER = "reward"
ADAPTER_FILE = "adapter_model.safetensors"
HEAD_PREFIX = "base_model.model.score."  # as PEFT saves a classifier's head with its adapter
TASK_TYPES = {1: "SEQ_CLS", 2: "TOKEN_CLS"}  # by number of classes: outcome and process reward models


class SharedBaseScorer(PreTrainedModel):
    """
    A reward model that is an adapter and a head on the policy's base model.

    It is read from, and saved as, an ordinary PEFT adapter of a sequence or token classifier, so that
    [`~trl.RewardTrainer`] and [`~trl_grpo_ext.PRMTrainer`] can make the first one, and the last one can be used alone.

    Args:
        name_or_path (`str`):
            Folder or Hub id of a trained adapter with a score head.

    Raises:
        `ValueError`: if it is no adapter, or one without a head.
    """

    config_class = PreTrainedConfig

    def __init__(self, name_or_path: str):
        from peft import PeftConfig

        if find_adapter_config_file(name_or_path) is None:
            raise ValueError(
                f"`reward_model` is {name_or_path!r}, which is no adapter, but `shared_base` puts it on the policy's "
                "base model; name a LoRA adapter trained on that base, or use shared_base=False."
            )
        state, head = split_head(load_file(cached_file(name_or_path, ADAPTER_FILE)))
        if not head:
            raise ValueError(
                f"`reward_model` is {name_or_path!r}, an adapter without a score head; name one that RewardTrainer or "
                "PRMTrainer has trained."
            )
        num_labels, hidden_size = head["weight"].shape
        super().__init__(PreTrainedConfig(num_labels=num_labels, name_or_path=name_or_path))
        self.peft_config = PeftConfig.from_pretrained(name_or_path)
        self.score = nn.Linear(hidden_size, num_labels, bias="bias" in head)
        self.score.load_state_dict(head)
        self._first_state = state
        self._policy: tuple = ()  # held in a tuple, for a registered module would be trained and saved with this one

    def attach(self, policy: Any) -> None:
        """
        Put the adapter on a policy's base model.

        Args:
            policy ([`~peft.PeftModel`]):
                The policy, with its own adapter active.

        Raises:
            `ValueError`: if the adapter does not fit the base model.
        """
        from peft import set_peft_model_state_dict

        config = copy.copy(self.peft_config)
        config.task_type, config.modules_to_save = "CAUSAL_LM", None  # the head is kept here
        policy_adapter = policy.active_adapter
        policy.add_adapter(REWARD_ADAPTER, config)
        policy.set_adapter(policy_adapter)
        try:
            set_peft_model_state_dict(policy, self._first_state, adapter_name=REWARD_ADAPTER)
        except RuntimeError as error:
            raise ValueError(
                f"`reward_model` is {self.config.name_or_path!r}, an adapter of {config.base_model_name_or_path!r}, "
                "which does not fit the policy's base model; name one trained on that, or use shared_base=False."
            ) from error
        self._policy = (policy,)
        self.adapter = nn.ParameterList(p for name, p in policy.named_parameters() if f".{REWARD_ADAPTER}." in name)
        self.score.to(self.adapter[0].device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it the base model is the reward model's, without dropout; forward passes outside see to it alone."""
        (policy,) = self._policy
        with use_adapter(policy, REWARD_ADAPTER) if policy.active_adapter != REWARD_ADAPTER else nullcontext():
            modes = {module: module.training for module in policy.modules()}
            for module in modes:
                # In eval mode bitsandbytes packs 4-bit weights on a CPU, by which they lose their gradient for good
                module.training = is_quantized(module)
            try:
                yield
            finally:
                for module, mode in modes.items():
                    module.training = mode

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs):
        (policy,) = self._policy
        with self.active():
            backbone = policy.get_base_model().base_model
            hidden = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = self.score(hidden.float())
        if self.config.num_labels > 1:
            return TokenClassifierOutput(logits=logits)
        # As transformers' sequence classifiers have it: at the last token that is no padding
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (positions * (input_ids != self.config.pad_token_id)).argmax(-1)
        return SequenceClassifierOutput(logits=logits[torch.arange(len(last)), last])

    def save_pretrained(self, folder: str | Path, **kwargs) -> None:
        """Write adapter and head as PEFT does for a classifier."""
        from peft import get_peft_model_state_dict

        (policy,) = self._policy
        state = get_peft_model_state_dict(policy, adapter_name=REWARD_ADAPTER)
        config = copy.copy(self.peft_config)
        config.task_type, config.modules_to_save = TASK_TYPES[self.config.num_labels], ["score"]
        config.inference_mode = True
        config.save_pretrained(folder)
        tensors = {**state, **{HEAD_PREFIX + name: value for name, value in self.score.state_dict().items()}}
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, Path(folder, ADAPTER_FILE)
        )

    def load_saved(self, folder: Path) -> None:
        """Set adapter and head to those that [`save_pretrained`] wrote."""
        from peft import set_peft_model_state_dict

        state, head = split_head(load_file(folder / ADAPTER_FILE))
        self.score.load_state_dict(head)
        set_peft_model_state_dict(self._policy[0], state, adapter_name=REWARD_ADAPTER)


def split_head(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of an adapter, and those of the head that was saved with it."""
    head = {name.removeprefix(HEAD_PREFIX): value for name, value in state.items() if name.startswith(HEAD_PREFIX)}
    return {name: value for name, value in state.items() if not name.startswith(HEAD_PREFIX)}, head


def is_quantized(module: nn.Module) -> bool:
    """Whether a module's own weight is quantized by bitsandbytes."""
    return hasattr(getattr(module, "weight", None), "quant_state")
