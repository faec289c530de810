"""Prompts that are computed once give the log probabilities and gradients of whole rows, whatever the attention."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.shared_prefix import (
    SharedPrefix,
    cache_argument,
    has_dropout,
    number_prompts,
    recomputes_activations,
)


SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "mistral, sliding window": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
    "gemma3, sliding window in every other layer": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    ),
    "gpt2, absolute positions": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=100, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        ),
    ),
}  # fmt: skip
PROMPT_LENGTHS = [9, 9, 9, 4, 4, 9, 1]  # the third prompt of 9 tokens is another one
PROMPTS = [0, 0, 0, 1, 1, 2, 3]
COMPLETION_LENGTHS = [6, 1, 4, 6, 2, 5, 3]


def batch_of_ids():
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 100, (9,), generator=generator) for _ in range(4)]
    ids = torch.zeros(7, 15, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, before, after) in enumerate(zip(PROMPTS, PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        ids[row, 9 - before : 9] = prompts[prompt][:before]
        ids[row, 9 : 9 + after] = torch.randint(5, 100, (after,), generator=generator)
        mask[row, 9 - before : 9 + after] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :9] = -100
    return ids, mask, labels


def logps_and_gradient(model, caller, ids, mask, labels):
    model.zero_grad()
    outputs = caller(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    logps, entropy = outputs.log_probs[:, -6:], outputs.entropy[:, -6:].detach()
    (logps * torch.arange(1, 43).view(7, 6)).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return logps.detach(), entropy, gradient


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_entropies_and_gradients_are_those_of_whole_rows(name, attention):
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask, labels = batch_of_ids()
    prompt_of = number_prompts(ids, mask, 9)
    whole = logps_and_gradient(model, model, ids, mask, labels)
    shared = logps_and_gradient(model, SharedPrefix(model, prompt_of, 9, cache_argument(model)), ids, mask, labels)
    assert whole[0].abs().max() > 1
    for ours, theirs in zip(shared, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_prompts_are_computed_once_and_completions_without_them():
    model = LlamaForCausalLM(MODELS["llama"][1])
    add_fused_lm_head(model)
    shapes = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    ids, mask, labels = batch_of_ids()
    SharedPrefix(model, number_prompts(ids, mask, 9), 9, cache_argument(model))(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    assert shapes == [(4, 8), (7, 7)]


def test_prompts_are_told_apart_by_ids_and_padding():
    ids, mask, _ = batch_of_ids()
    numbers = number_prompts(ids, mask, 9).tolist()
    assert [[a == b for b in numbers] for a in numbers] == [[a == b for b in PROMPTS] for a in PROMPTS]
    # What is under the padding does not matter, where it ends does
    padded = ids.clone()
    padded[3, 0], padded[4, 0] = 7, 8
    assert number_prompts(padded, mask, 9)[3] == number_prompts(padded, mask, 9)[4]
    shorter = mask.clone()
    shorter[1, 0] = 0
    assert number_prompts(ids, shorter, 9)[0] != number_prompts(ids, shorter, 9)[1]


def test_dropout_and_recomputed_activations_are_seen():
    model = LlamaForCausalLM(MODELS["llama"][1])
    assert not has_dropout(model)
    assert not recomputes_activations(model)
    model.gradient_checkpointing_enable()
    assert recomputes_activations(model)
    assert has_dropout(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10)))
    assert has_dropout(LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)))
