import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

from trl_grpo_ext import ProcessRewardModel
from trl_grpo_ext.iterative.outcome_reward_model import OutcomeRewardModel
from trl_grpo_ext.prm.process_reward_model import write_settings

from ..tiny import save_tiny_model
from ..trainers.helpers import generation_batch
from ..trainers.test_iterative_trainer import LORA, kl_of, trainer_of_kind


CLASSES = {"outcome": (LlamaForSequenceClassification, 1), "process": (LlamaForTokenClassification, 2)}
PROMPTS, COMPLETIONS = ["Count 1:", "Count 2:", "Count 3:"], ["1\n2", "3", "4\n5\n66666"]


def save_adapter(folder, tokenizer, kind, hidden_size=16):
    """An adapter with a head, of random weights, on the base that the policy has."""
    base = save_tiny_model(folder / "base", hidden_size=hidden_size)
    model_class, num_labels = CLASSES[kind]
    torch.manual_seed(2)
    model = model_class.from_pretrained(base, num_labels=num_labels)
    if model.score.bias is not None:
        torch.nn.init.normal_(model.score.bias)
    config = LoraConfig(**LORA, init_lora_weights=False, modules_to_save=["score"])
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    if kind == "process":
        settings = {"step_separator": "\n", "max_length": None, "max_completion_length": None}
        write_settings(folder / "adapter", **settings)
    return base, folder / "adapter"


def shared_trainer(folder, tokenizer, kind, quantized=False, **options):
    base, adapter = save_adapter(folder, tokenizer, kind, hidden_size=64 if quantized else 16)
    return trainer_of_kind(
        "qlora" if quantized else "lora",
        folder,
        tokenizer,
        reward_update=kind,
        shared_base=True,
        trainer_options={"model": base, "reward_model": adapter},
        **options,
    )


def score(reward_model):
    if isinstance(reward_model, OutcomeRewardModel):
        return torch.tensor(reward_model(PROMPTS, COMPLETIONS))
    rows = reward_model.score(PROMPTS, [completion.split("\n") for completion in COMPLETIONS])
    return torch.tensor([value for row in rows for value in row])


@pytest.mark.parametrize("kind", CLASSES)
def test_it_scores_as_the_adapter_on_a_base_of_its_own(tmp_path, tokenizer, kind):
    trainer = shared_trainer(tmp_path, tokenizer, kind)
    alone = {"outcome": OutcomeRewardModel, "process": ProcessRewardModel}[kind](tmp_path / "adapter")
    expected = score(alone)
    torch.testing.assert_close(score(trainer.reward_model), expected)
    assert expected.std() > 1e-4
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".default." in name:
                parameter.add_(1.0)
    torch.testing.assert_close(score(trainer.reward_model), expected)  # of its own adapter alone


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_three_models_are_trained_on_one_base(tmp_path, tokenizer, kind, quantized):
    trainer = shared_trainer(tmp_path, tokenizer, kind, quantized)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    first_scores = score(trainer.reward_model)
    trainer.train()
    parts = {"default": set(), "ref": set(), "reward": set(), "base": set()}
    for name, parameter in trainer.model.named_parameters():
        part = next((part for part in parts if f".{part}." in name), "base")
        parts[part].add(torch.equal(before[name], parameter))
        assert parameter.requires_grad == (part == "default"), name
    assert parts == {"default": {False}, "ref": {False}, "reward": {False}, "base": {True}}
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == kl[2] == kl[4] == 0 < min(kl[1], kl[3], kl[5])
    assert (score(trainer.reward_model) - first_scores).abs().max() > 1e-4
    assert trainer.model.active_adapter == "default"
    assert kl_of(trainer, generation_batch(trainer)) == 0  # the next iteration would start from here


@pytest.mark.parametrize("kind", CLASSES)
def test_it_is_saved_apart_and_loads_alone(tmp_path, tokenizer, kind):
    trainer = shared_trainer(tmp_path, tokenizer, kind)
    trainer.train()
    trainer.save_model()
    output = tmp_path / "output"
    assert (output / "adapter_model.safetensors").exists()
    assert not (output / "ref").exists()
    assert not (output / "reward").exists()
    alone = {"outcome": OutcomeRewardModel, "process": ProcessRewardModel}[kind](output / "reward_model")
    torch.testing.assert_close(score(alone), score(trainer.reward_model))


def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path, tokenizer):
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = shared_trainer(tmp_path, tokenizer, "outcome", **options)
    whole.train()
    resumed = shared_trainer(tmp_path, tokenizer, "outcome", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-3"))
    for (name, ours), (_, theirs) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert torch.equal(whole.reward_model.model.score.weight, resumed.reward_model.model.score.weight)


def test_what_cannot_share_a_base_is_refused(tmp_path, tokenizer):
    base, adapter = save_adapter(tmp_path, tokenizer, "outcome")

    def refused(match, kind="lora", **trainer_options):
        with pytest.raises(ValueError, match=match):
            trainer_of_kind(kind, tmp_path, tokenizer, shared_base=True, trainer_options=trainer_options)

    refused("the policy has no adapter of its own", kind="full", model=base, reward_model=adapter)
    wide = save_tiny_model(tmp_path / "wide", hidden_size=64)
    refused("does not fit the policy's base model", model=wide, reward_model=adapter)
    refused("which is no adapter", model=base, reward_model=base)
    refused("`reward_model` is a OutcomeRewardModel", model=base)
