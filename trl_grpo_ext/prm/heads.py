"""Native classes for published PRMs whose own code does not run on current transformers, under their weight names."""

import torch
from torch import nn
from transformers import Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """Qwen2.5-Math-PRM: two linear layers on each token's last hidden state, to two classes."""

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        hidden_size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 2))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs) -> TokenClassifierOutput:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))


class ValueHead(nn.Module):
    """One number from a hidden state, under the name that TRL's value heads have."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.summary = nn.Linear(hidden_size, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.summary(hidden)


class Qwen2ForStepValues(Qwen2PreTrainedModel):
    """Skywork-o1-Open-PRM: a value head on each token's last hidden state. Its language head is not loaded."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\..*"]

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.v_head = ValueHead(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs) -> TokenClassifierOutput:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return TokenClassifierOutput(logits=self.v_head(hidden))
