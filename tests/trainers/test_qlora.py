"""QLoRA from training to a merged model of 16 or 32 bits, with bitsandbytes' NF4 on CPU."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer

from ..tiny import prompt_dataset, save_tiny_model, tiny_tokenizer
from .helpers import SETTINGS, cut_every_four, length_reward, step_length_reward


TEXT = "Count 3: so we add one more and go on"


def load(path, bits=4, dtype=torch.float32):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options = {"quantization_config": nf4} if bits == 4 else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


@torch.no_grad()
def logits(model):
    # In train mode: in eval mode bitsandbytes has 4-bit kernels of its own on some CPUs
    return model.train()(input_ids=torch.tensor([tiny_tokenizer().encode(TEXT)])).logits.float()


def gap(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with process supervision, its 4-bit base before and after, and where base and adapter lie."""
    folder = tmp_path_factory.mktemp("qlora")
    base, adapter = save_tiny_model(folder / "base", hidden_size=64), folder / "adapter"  # NF4 has blocks of 64
    trainer = GRPOExtTrainer(
        load(base),
        length_reward,
        GRPOExtConfig(str(adapter), **{**SETTINGS, "beta": 0.1, "max_steps": 3}, supervision="process"),
        train_dataset=prompt_dataset(),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
        step_reward_funcs=step_length_reward,
        step_splitter=cut_every_four,
    )
    before = frozen_bytes(trainer.model)
    trainer.train()
    trainer.save_model()
    log = [entry for entry in trainer.state.log_history if "kl" in entry]
    return SimpleNamespace(model=trainer.model, before=before, base=base, adapter=adapter, log=log)


def frozen_bytes(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def adapted(run, model):
    return PeftModel.from_pretrained(model, run.adapter)


def test_the_base_keeps_its_bytes_and_is_the_reference(run):
    assert sum(value.dtype == torch.uint8 for value in run.before.values()) == 2 * 7  # all linear layers
    after = frozen_bytes(run.model)
    assert after.keys() == run.before.keys()
    assert all(torch.equal(after[name], value) for name, value in run.before.items())
    with run.model.disable_adapter():
        assert torch.equal(logits(run.model), logits(load(run.base)))
    kl = [entry["kl"] for entry in run.log]
    assert kl[0] == 0 < min(kl[1:])
    assert all(entry["grad_norm"] > 0 for entry in run.log)


def test_a_reloaded_adapter_gives_the_logits_of_the_trained_one(run):
    trained = logits(run.model)
    assert gap(logits(load(run.base)), trained) > 0.1  # what the adapter makes of it
    model = load(run.adapter)
    reloaded = logits(model)
    print(f"by an adapter in float32: {gap(reloaded, trained):.1e}")
    assert gap(reloaded, trained) < 3e-3
    # PEFT loads an adapter in float32, and TRL trains it in bfloat16 on a quantized base: as that, no bit differs
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    assert torch.equal(logits(model), trained)


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_merged_into_an_unquantized_base_it_is_base_and_adapter(run, tmp_path, dtype, noise):
    apart = adapted(run, load(run.base, bits=16, dtype=dtype))
    expected = logits(apart)
    apart.merge_and_unload().save_pretrained(tmp_path)
    merged = load(tmp_path, bits=16, dtype=dtype)
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    print(f"{dtype}: {gap(logits(merged), expected):.1e}")
    assert gap(logits(merged), expected) < noise


def test_a_merged_model_differs_from_the_trained_one_by_the_quantization_alone(run):
    quantized = logits(load(run.adapter))
    # Of the numbers that the 4 bits stand for it is the same
    dequantized = adapted(run, load(run.base).dequantize().float()).merge_and_unload()
    assert gap(logits(dequantized), quantized) < 1e-5
    # Of those they were made of it differs as the base itself does
    merged = logits(adapted(run, load(run.base, bits=16)).merge_and_unload())
    of_the_base = gap(logits(load(run.base)), logits(load(run.base, bits=16)))
    print(f"by quantization: the base {of_the_base:.2f}, merged {gap(quantized, merged):.2f}")
    assert of_the_base > 0.1
    assert 0.7 < gap(quantized, merged) / of_the_base < 1.3
