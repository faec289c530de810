"""Prompts that are computed once give the log probabilities and gradients of whole rows, whatever the attention."""

import copy
from itertools import pairwise

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_attention
from hypothesis import given
from hypothesis import strategies as st
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

from trl_grpo_ext.batching import PASS_TOKENS
from trl_grpo_ext.shared_prefix import (
    SharedPrefix,
    cache_argument,
    cheapest_prefix,
    has_dropout,
    number_prompts,
    prefix_batches,
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
FLASH_MODELS = [name for name in MODELS if "gpt2" not in name]  # which transformers refuses in float32
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


def attend(queries, keys, values, causal, softmax_scale, window_size=(-1, -1)):
    """What flash attention computes, in float32 on a CPU: causal masks end at the last query and the last key."""
    repeats = queries.shape[-2] // keys.shape[-2]
    keys, values = (each.repeat_interleave(repeats, -2) for each in (keys, values))
    scores = torch.einsum("...qhd,...khd->...hqk", queries, keys) * softmax_scale
    last = torch.arange(queries.shape[-3])[:, None] + keys.shape[-3] - queries.shape[-3]
    before = last - torch.arange(keys.shape[-3])  # how far a key is behind its query
    assert causal
    is_seen = (before >= 0) & ((before <= window_size[0]) | (window_size[0] < 0))
    return torch.einsum("...hqk,...khd->...qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values)


def attend_to_packed_rows(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_size=(-1, -1)
):
    """The same for rows one after the other, without padding."""
    ends = ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    rows = zip(*(tensor.tensor_split(lengths[1:-1].tolist()) for tensor, lengths in ends), strict=True)
    return torch.cat([attend(*row, causal, softmax_scale, window_size) for row in rows])


@pytest.fixture
def flash_attention_without_a_gpu(monkeypatch):
    """All of transformers' flash attention, which drops padding and cuts masks, but the kernel."""
    kernels = (attend, attend_to_packed_rows, None, flash_attention._pad_input, flash_attention._unpad_input)
    monkeypatch.setattr(flash_attention, "_lazy_imports", lambda *args, **kwargs: kernels)
    monkeypatch.setattr(flash_attention, "_loaded_implementation", None)


def build_model(name, attention):
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    model = model_class._from_config(
        copy.deepcopy(config), attn_implementation="eager" if attention == "flash" else attention
    )
    if attention == "flash":
        model.config._attn_implementation = "flash_attention_2"  # set_attn_implementation() wants a GPU
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.train()


@pytest.mark.parametrize("name", FLASH_MODELS)
@pytest.mark.usefixtures("flash_attention_without_a_gpu")
def test_the_stand_in_for_flash_attention_computes_attention(name):
    batch = batch_of_ids()
    flash, eager = (build_model(name, attention) for attention in ("flash", "eager"))
    for ours, theirs in zip(
        logps_and_gradient(flash, flash, *batch), logps_and_gradient(eager, eager, *batch), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for attention in ("sdpa", "eager") for name in MODELS]
    + [(name, "flash") for name in FLASH_MODELS],
)
@pytest.mark.usefixtures("flash_attention_without_a_gpu")
def test_log_probabilities_entropies_and_gradients_are_those_of_whole_rows(name, attention):
    model = build_model(name, attention)
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


ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=9)


def cost_of(rows, prefix_length):
    """Tokens that a padded batch computes, and what its passes cost besides."""
    beginnings = {tuple(row[:prefix_length]) for row in rows}
    computed = len(beginnings) * prefix_length + len(rows) * (max(map(len, rows)) - prefix_length)
    return computed + PASS_TOKENS * (1 + (prefix_length > 0))


@given(ROWS, st.integers(0, 8), st.integers(1, 300))
def test_the_cheapest_beginning_is_found(rows, longest, repeats):
    rows = [row * repeats for row in rows]  # long enough that a further pass may pay
    longest = min(longest * repeats, min(map(len, rows)))
    length, cost = cheapest_prefix(rows, longest)
    assert length <= longest
    assert cost == cost_of(rows, length)
    differ = [[i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y] for a in rows for b in rows]
    common = {places[0] for places in differ if places}
    for other in {0, longest, length - 1, length + 1, *common}:
        if 0 <= other <= longest:
            assert cost <= cost_of(rows, other)


@given(ROWS, st.integers(1, 4), st.integers(1, 300))
def test_batches_have_each_row_once_and_cost_no_more_than_by_length(rows, batch_size, repeats):
    rows = [row * repeats for row in rows]
    shared_up_to = [len(row) - 1 for row in rows]
    plan = prefix_batches(rows, shared_up_to, batch_size)
    assert sorted(row for batch, _ in plan for row in batch) == list(range(len(rows)))
    for batch, prefix_length in plan:
        assert len(batch) <= batch_size
        assert all(prefix_length <= shared_up_to[row] for row in batch)
    costs = [cost_of([rows[row] for row in batch], length) for batch, length in plan]
    assert all(first >= second for first, second in pairwise(costs))
    by_length = sorted(rows, key=lambda row: -len(row))
    plain = [by_length[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    assert sum(costs) <= sum(cost_of(batch, 0) for batch in plain)


def test_rows_that_begin_alike_go_together():
    first, second = [1] * 900, [2] * 900
    rows = [first + [3] * 20, second + [4] * 30, first + [5] * 10, second + [6] * 20]
    assert prefix_batches(rows, [900] * 4, 2) == [([1, 3], 900), ([0, 2], 900)]
