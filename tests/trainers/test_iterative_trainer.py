import json
import shutil

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForSequenceClassification, TrainerCallback
from trl import GRPOConfig

from trl_grpo_ext import IterativeGRPOTrainer, ProcessRewardModel
from trl_grpo_ext.iterative.outcome_reward_model import OutcomeRewardModel
from trl_grpo_ext.prm.formats import FORMATS

from ..iterative.helpers import (
    make_iterative_trainer,
    parity_labels,
    tiny_outcome_model,
    tiny_process_model,
    tiny_scorer,
)
from ..tiny import prompt_dataset, save_tiny_model, tiny_model
from .helpers import assert_equal_weights, generation_batch, length_reward


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
KINDS = ["full", "lora", "qlora"]


def trainer_of_kind(kind, folder, tokenizer, trainer_options=None, **options):
    trainer_options = dict(trainer_options or {})
    if kind != "full":
        trainer_options["peft_config"] = LoraConfig(**LORA)
    if kind == "qlora":
        trainer_options.setdefault(
            "model", save_tiny_model(folder / "wide", hidden_size=64)
        )  # bitsandbytes packs 32 rows
        trainer_options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    return make_iterative_trainer(folder, tokenizer, trainer_options=trainer_options, **options)


def kl_of(trainer, batch):
    """
    Largest gap between the policy's and the reference's log probabilities of some completions.

    In train mode, as it has no dropout: after a forward pass in eval mode bitsandbytes' 4-bit layers have no gradient
    on some CPUs.
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        policy = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)
        if trainer.ref_model is not None:
            logits = trainer.ref_model(input_ids=ids, attention_mask=mask).logits
        else:
            trainer.model.set_adapter("ref")
            logits = trainer.model(input_ids=ids, attention_mask=mask).logits
            trainer.model.set_adapter("default")
    reference = logits[:, -length - 1 : -1].log_softmax(-1)
    return ((policy - reference) * batch["completion_mask"][..., None]).abs().max().item()


def record_reference_gaps(trainer):
    """The gap on one batch before and after each update of the reference."""
    gaps = []
    move = trainer._move_reference

    def moved(share):
        if trainer.state.global_step > 0:
            batch = generation_batch(trainer)
            before = kl_of(trainer, batch)
            move(share)
            gaps.append((before, kl_of(trainer, batch)))
        else:
            move(share)

    trainer._move_reference = moved
    return gaps


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_becomes_the_policy(tmp_path, tokenizer, kind):
    trainer = trainer_of_kind(kind, tmp_path, tokenizer)
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if not parameter.requires_grad and ".ref." not in name
    }
    gaps = record_reference_gaps(trainer)
    trainer.train()
    assert len(gaps) == 3  # the last one is for a run that is extended
    for before, after in gaps:
        assert before > 1e-3
        assert after == 0
    assert frozen or kind == "full"
    for name, parameter in trainer.model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name]), name
        assert ".ref." not in name or not parameter.requires_grad
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == kl[2] == kl[4] == 0
    assert min(kl[1], kl[3], kl[5]) > 0


def test_a_moving_average_lies_between(tmp_path, tokenizer):
    trainer = make_iterative_trainer(tmp_path, tokenizer, reference_update="ema", ref_model_mixup_alpha=0.25)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    expected = {}
    move = trainer._move_reference

    def moved(share):
        if not expected and trainer.state.global_step > 0:
            for name, parameter in trainer.model.named_parameters():
                expected[name] = 0.75 * start[name] + 0.25 * parameter.detach()
            move(share)
            for name, parameter in trainer.ref_model.named_parameters():
                torch.testing.assert_close(parameter, expected[name])
        else:
            move(share)

    trainer._move_reference = moved
    trainer.train()
    assert expected


def test_without_updates_the_reference_stays(tmp_path, tokenizer):
    trainer = make_iterative_trainer(tmp_path, tokenizer, reference_update="none")
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.ref_model.named_parameters():
        assert torch.equal(parameter, start[name])


def test_the_first_reference_is_the_live_policy_not_the_one_of_its_path(tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "model"))
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"model": model})
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0


def test_a_trained_adapter_is_its_own_first_reference(tmp_path, tokenizer):
    model = get_peft_model(tiny_model(tokenizer), LoraConfig(**LORA, init_lora_weights=False))
    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"model": model})
    gaps = record_reference_gaps(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0
    assert [after for _, after in gaps] == [0, 0, 0]


def test_the_optimizer_is_kept_over_iterations(tmp_path, tokenizer):
    trainer = trainer_of_kind("lora", tmp_path, tokenizer)
    trainer.train()
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {6}


def test_no_reference_adapter_is_saved(tmp_path, tokenizer):
    trainer = trainer_of_kind("lora", tmp_path, tokenizer, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "output" / "README.md").content
    assert "iterative GRPO (Algorithm 1)" in card
    assert "| `num_rl_iterations` | `3` |" in card
    for folder in (tmp_path / "output", tmp_path / "output" / "checkpoint-4"):
        assert (folder / "adapter_model.safetensors").exists()
        assert not (folder / "ref").exists()
    assert (tmp_path / "output" / "reward_model" / "model.safetensors").exists()
    assert not list((tmp_path / "output" / "reward_model").glob("*optimizer*"))


class Recorder:
    """The reward model's weights at each scoring, with what was scored."""

    def __init__(self, reward_model):
        self.calls = []
        self.reward_model = reward_model
        self.__name__ = "recorder"

    def __call__(self, prompts, completions, completion_ids, trainer_state, **kwargs):
        weight = self.reward_model.model.score.weight.detach().clone()
        self.calls.append((trainer_state.global_step, weight, completion_ids))
        return [0.0] * len(completions)


def test_completions_are_scored_by_the_reward_model_of_their_iteration(tmp_path, tokenizer):
    reward_model = tiny_outcome_model(tokenizer)
    recorder = Recorder(reward_model)
    trainer = make_iterative_trainer(
        tmp_path,
        tokenizer,
        # A generation batch serves two steps: an iteration of two steps samples once
        steps_per_generation=2,
        per_device_train_batch_size=4,
        trainer_options={"reward_model": reward_model, "reward_funcs": [recorder]},
    )
    trainer.train()
    assert [step for step, _, _ in recorder.calls] == [0, 2, 4]
    weights = [weight for _, weight, _ in recorder.calls]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert not trainer.reward_model.model.training


def test_rollouts_hold_what_was_sampled(tmp_path, tokenizer):
    trainer = make_iterative_trainer(tmp_path, tokenizer, "process", trainer_options={"step_verifier": parity_labels})
    trainer.train()
    rows = datasets.load_dataset(str(tmp_path / "rollouts"), split="train")
    assert len(rows) == 6 * 8
    assert rows["iteration"][:] == [0] * 16 + [1] * 16 + [2] * 16
    for row in rows:
        assert "".join(row["steps"]) == row["completion"].rstrip("\ufffd")  # an unfinished character is no text
        assert len(row["steps"]) == len(row["step_rewards"]) == len(row["step_labels"]) == len(row["step_ends"])
        assert row["step_labels"] == parity_labels([row["steps"]])[0]
        assert tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == row["completion"]
        assert tokenizer.decode(row["prompt_ids"]) == row["prompt"]
        assert row["verified"] == float(sum(row["completion_ids"]) % 2)
        assert 0 <= row["reward"] <= 1


def test_the_share_of_replay_and_what_is_never_trained_on(tmp_path, tokenizer):
    seen = []
    trainer = make_iterative_trainer(
        tmp_path,
        tokenizer,
        "process",
        replay_ratio=0.25,
        reward_eval_share=0.3,
        trainer_options={"step_verifier": parity_labels},
    )
    train = trainer.reward_update.train
    trainer.reward_update.train = lambda examples, options: (seen.append(examples), train(examples, options))
    trainer.train()
    rows = datasets.load_dataset(str(tmp_path / "rollouts"), split="train")
    completions = {(row["prompt"], "".join(row["steps"])): row["iteration"] for row in rows}
    held_out_prompts = {row["prompt"] for row in rows} - {e["prompt"] for examples in seen for e in examples}
    assert held_out_prompts
    for iteration, examples in enumerate(seen):
        iterations = [completions[e["prompt"], "".join(e["completions"])] for e in examples]
        replayed = sum(i < iteration for i in iterations)
        wanted = 0 if iteration == 0 else round(len(examples) / 4)
        assert abs(replayed - wanted) <= 1
    logged = [entry for entry in trainer.state.log_history if "reward_model/replay_share" in entry]
    assert [entry["reward_model/num_examples"] for entry in logged] == [len(examples) for examples in seen]
    assert logged[0]["reward_model/replay_share"] == 0


def test_the_reward_model_learns_the_verdict(tmp_path, tokenizer):
    """With a verdict that can be seen in the text, pairs are told apart after the updates and not before."""

    def is_long(completion_ids, **kwargs):
        return [float(len(ids) >= 10) for ids in completion_ids]

    trainer = make_iterative_trainer(
        tmp_path,
        tokenizer,
        num_rl_iterations=2,
        steps_per_rl_iteration=16,
        learning_rate=1e-6,
        reward_model_learning_rate=3e-3,
        reward_model_batch_size=16,
        reward_model_epochs=20,
        reward_eval_share=0.3,
        trainer_options={"verifier": is_long, "train_dataset": prompt_dataset(64)},
    )
    trainer.train()
    updates = [entry for entry in trainer.state.log_history if "reward_model/agreement" in entry]
    assert updates[0]["reward_model/before_update/agreement"] < 0.6
    assert updates[-1]["reward_model/agreement"] > 0.85


def test_training_a_reward_model_leaves_the_policys_randomness_alone(tmp_path, tokenizer):
    """A reward model without influence on the policy: whether it is trained changes nothing."""
    weights = []
    for reward_update in ("outcome", "none"):
        reward_model = tiny_outcome_model(tokenizer)
        trainer = make_iterative_trainer(
            tmp_path / reward_update,
            tokenizer,
            reward_update,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
            reward_weights=[0.0, 1.0],
            trainer_options={"reward_model": reward_model, "reward_funcs": length_reward},
        )
        before = reward_model.model.score.weight.detach().clone()
        trainer.train()
        assert torch.equal(before, reward_model.model.score.weight) == (reward_update == "none")
        weights.append(trainer.model)
    assert_equal_weights(*weights)


@pytest.mark.parametrize("reward_update", ["outcome", "process"])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("checkpoint", [1, 2, 3])
def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path, tokenizer, reward_update, kind, checkpoint):
    if kind == "lora" and (reward_update == "process" or checkpoint != 2):
        pytest.skip("covered by the full models")
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = trainer_of_kind(kind, tmp_path, tokenizer, reward_update=reward_update, **options)
    whole.train()
    for folder in (tmp_path / "output").glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > checkpoint:
            shutil.rmtree(folder)
    resumed = trainer_of_kind(kind, tmp_path, tokenizer, reward_update=reward_update, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(whole.model, resumed.model)
    assert_equal_weights(whole.reward_model.model, resumed.reward_model.model)
    for name, parameter in whole._reference_parameters.items():
        assert torch.equal(parameter, resumed._reference_parameters[name]), name
    ours, theirs = (t.reward_update.optimizer.state_dict()["state"] for t in (whole, resumed))
    assert ours.keys() == theirs.keys()
    for index, first in ours.items():
        second = theirs[index]
        assert first["step"] == second["step"] > 0
        assert torch.equal(first["exp_avg_sq"], second["exp_avg_sq"])
    assert len(datasets.load_dataset(str(tmp_path / "rollouts"), split="train")) == 6 * 8


def test_an_incomplete_checkpoint_is_passed_over(tmp_path, tokenizer):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_iterative_trainer(tmp_path, tokenizer, **options).train()
    last = tmp_path / "output" / "checkpoint-6" / "trainer_state.json"
    last.write_text(last.read_text()[:100])
    (tmp_path / "output" / "checkpoint-8").mkdir()
    trainer = make_iterative_trainer(tmp_path, tokenizer, **options)
    start = []

    class Start(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            start.append(state.global_step)

    trainer.add_callback(Start())
    trainer.train(resume_from_checkpoint=True)
    assert start == [4]
    assert json.loads(last.read_text())["global_step"] == 6


def test_steps_are_labelled_by_sampling(tmp_path, tokenizer):
    """Soft labels are shares of continuations; the last step's label is whether the answer is right."""
    trainer = make_iterative_trainer(
        tmp_path, tokenizer, "process", label_continuations=4, label_completions=6, num_rl_iterations=2
    )
    trainer.train()
    rows = datasets.load_dataset(str(tmp_path / "rollouts"), split="train").to_list()
    for iteration in (0, 1):
        labelled = [row for row in rows if row["iteration"] == iteration and row["step_labels"]]
        assert len(labelled) == 6
        for row in labelled:
            assert len(row["step_labels"]) == len(row["steps"])
            assert all(label in (0, 0.25, 0.5, 0.75, 1) for label in row["step_labels"])
            assert row["step_labels"][-1] in (0, 1)


def test_what_was_labelled_before_a_kill_is_not_labelled_again(tmp_path, tokenizer):
    options = {"label_continuations": 2, "label_completions": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_iterative_trainer(tmp_path, tokenizer, "process", **options)
    whole.train()
    resumed = make_iterative_trainer(tmp_path, tokenizer, "process", **options)
    sampled = []
    sample = resumed._sample_together
    resumed._sample_together = lambda prefixes: sampled.append(len(prefixes)) or sample(prefixes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-2"))
    # Four iterations' worth would be six files; those of the first iteration are labelled already
    assert 0 < len(sampled) <= 4
    assert_equal_weights(whole.reward_model.model, resumed.reward_model.model)


def test_a_new_run_renames_the_rollouts_of_an_earlier_one(tmp_path, tokenizer):
    for _ in range(2):
        make_iterative_trainer(tmp_path, tokenizer).train()
    for folder in ("rollouts", "rollouts-1"):
        assert len(datasets.load_dataset(str(tmp_path / folder), split="train")) == 6 * 8


def test_questions_without_a_pair_teach_nothing_and_say_so(tmp_path, tokenizer, caplog):
    trainer = make_iterative_trainer(
        tmp_path, tokenizer, trainer_options={"verifier": lambda completions, **kwargs: [1.0] * len(completions)}
    )
    before = trainer.reward_model.model.score.weight.detach().clone()
    trainer.train()
    assert torch.equal(before, trainer.reward_model.model.score.weight)
    assert "was not updated" in caplog.text


def test_reward_that_accuracy_does_not_explain_is_logged(tmp_path, tokenizer):
    trainer = make_iterative_trainer(tmp_path, tokenizer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward_model/unexplained_reward" in entry]
    assert abs(logged[0]["reward_model/unexplained_reward"]) < 1e-5  # what right and wrong ones are worth is set here
    assert {"verified_accuracy", "reward"} <= set(logged[-1])


def test_conversations(tmp_path, tokenizer):
    rows = {"prompt": [[{"role": "user", "content": f"Count {i}"}] for i in range(8)]}
    trainer = make_iterative_trainer(
        tmp_path, tokenizer, trainer_options={"train_dataset": datasets.Dataset.from_dict(rows)}
    )
    trainer.train()
    assert any("reward_model/num_examples" in entry for entry in trainer.state.log_history)


def test_what_cannot_work_is_refused(tmp_path, tokenizer):
    def refused(match, error=ValueError, **options):
        with pytest.raises(error, match=match):
            make_iterative_trainer(tmp_path, tokenizer, **options)

    refused("`num_rl_iterations` is 0", num_rl_iterations=0)
    refused("`steps_per_rl_iteration` is 0", steps_per_rl_iteration=0)
    refused("`max_steps` is 5", max_steps=5)
    refused("`replay_ratio` is 1.0", replay_ratio=1.0)
    refused("`reward_eval_share` is -0.1", reward_eval_share=-0.1)
    refused("`reward_model_learning_rate` is 0", reward_model_learning_rate=0)
    refused("`reward_model_epochs` is 0", reward_model_epochs=0)
    refused("`reward_model_batch_size` is 0", reward_model_batch_size=0)
    refused("`rollout_capacity` is 0", rollout_capacity=0)
    refused("`label_mode` is 'mild'", label_mode="mild")
    refused("`reward_update` is 'both'", reward_update="both")
    refused("`reference_update` is 'copy'", reference_update="copy")
    refused("`steps_per_rl_iteration` is 2, by which an iteration ends", steps_per_generation=4)
    refused("`sync_ref_model` is True", sync_ref_model=True)
    refused("without `beta` there is no reference", beta=0.0)
    process_model = tiny_process_model(tokenizer)
    refused(
        "`reward_model` is of class ProcessRewardModel",
        supervision="process",
        trainer_options={"reward_model": process_model},
    )
    refused("which labels no steps", label_mode="hard")
    refused("`step_verifier` is for 'process' alone", trainer_options={"step_verifier": parity_labels})
    signed = tiny_process_model(tokenizer)
    signed.format = FORMATS["pure"]
    refused("only token classifiers are trained along", reward_update="process",
            trainer_options={"reward_model": signed})  # fmt: skip
    with pytest.raises(ValueError, match="`reward_model` is missing"):
        IterativeGRPOTrainer(
            save_tiny_model(tmp_path / "model"),
            args=make_iterative_trainer(tmp_path, tokenizer).args,
            train_dataset=prompt_dataset(),
            processing_class=tokenizer,
        )
    with pytest.raises(TypeError, match="`args` is a GRPOConfig"):
        IterativeGRPOTrainer(
            save_tiny_model(tmp_path / "model"),
            args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False),
            train_dataset=prompt_dataset(),
            processing_class=tokenizer,
        )
    model = tiny_outcome_model(tokenizer)
    model.model.requires_grad_(False)
    refused("`reward_model` has no parameter that requires a gradient", trainer_options={"reward_model": model})


@pytest.mark.parametrize("verdicts", [[1, 0] * 4, [True, False] * 4, [1, None] * 4])
def test_verdicts_may_be_whole_numbers_or_truth_values(tmp_path, tokenizer, verdicts):
    make_iterative_trainer(tmp_path, tokenizer, trainer_options={"verifier": lambda **_: verdicts}).train()
    assert datasets.load_dataset(str(tmp_path / "rollouts"), split="train")["verified"][:8] == verdicts


@pytest.mark.parametrize("verdicts", [[0.5] * 8, [1.0] * 7, "right"])
def test_other_verdicts_are_refused(tmp_path, tokenizer, verdicts):
    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"verifier": lambda **_: verdicts})
    with pytest.raises(ValueError, match="`verifier` returned"):
        trainer.train()


def test_labels_by_sampling_need_solutions(tmp_path, tokenizer):
    dataset = prompt_dataset().remove_columns("solution")
    trainer = make_iterative_trainer(tmp_path, tokenizer, "process", trainer_options={"train_dataset": dataset})
    with pytest.raises(ValueError, match="`step_verifier` is missing"):
        trainer.train()


def test_pairs_that_are_too_long_are_left_out(tmp_path, tokenizer, caplog):
    reward_model = tiny_outcome_model(tokenizer, max_length=3)
    make_iterative_trainer(
        tmp_path, tokenizer, reward_weights=[1.0, 1.0],
        trainer_options={"reward_model": reward_model, "reward_funcs": [length_reward]},
    ).train()  # fmt: skip
    assert "was not updated" in caplog.text


def test_a_named_reward_model_is_trained_in_float32(tmp_path, tokenizer):
    folder = tmp_path / "scorer"
    tiny_outcome_model(tokenizer).model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"reward_model": str(folder)})
    assert trainer.reward_model.model.dtype == torch.float32


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path, tokenizer):
    options = {"save_strategy": "steps", "save_steps": 3}
    make_iterative_trainer(tmp_path, tokenizer, "none", **options).train()
    trainer = make_iterative_trainer(tmp_path, tokenizer, **options)
    with pytest.raises(ValueError, match="which lacks 'iteration/reward_model'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-3"))


def test_a_checkpoint_of_iterations_of_another_length_is_refused(tmp_path, tokenizer):
    make_iterative_trainer(tmp_path, tokenizer, save_strategy="steps", save_steps=3).train()
    trainer = make_iterative_trainer(tmp_path, tokenizer, steps_per_rl_iteration=3)
    with pytest.raises(ValueError, match=r"`steps_per_rl_iteration` is 3, but '.*' is of a run with 2, whose"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-3"))


def test_an_outcome_reward_model_that_cannot_be_used_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="`tokenizer` is missing"):
        OutcomeRewardModel(tiny_scorer(tokenizer, LlamaForSequenceClassification, 1))
    with pytest.raises(ValueError, match="`model` has 2 classes"):
        OutcomeRewardModel(tiny_scorer(tokenizer, LlamaForSequenceClassification, 2), tokenizer=tokenizer)
    tiny_scorer(tokenizer, LlamaForSequenceClassification, 2).save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="does not fit a reward model of one score"):
        OutcomeRewardModel(tmp_path / "two")
    with pytest.raises(ValueError, match="has no trained score head"):
        OutcomeRewardModel(save_tiny_model(tmp_path / "policy"))
    with pytest.raises(ValueError, match="neither a folder with a model"):
        OutcomeRewardModel(tmp_path / "nothing")
    with pytest.raises(TypeError, match="`model` is 7"):
        OutcomeRewardModel(7)
    with pytest.raises(ValueError, match="`batch_size` is 0"):
        tiny_outcome_model(tokenizer, batch_size=0)


def test_without_a_verifier_nothing_is_verified(tmp_path, tokenizer):
    def train(name, reward_update, **trainer_options):
        trainer_options.setdefault("verifier", None)
        trainer = make_iterative_trainer(tmp_path / name, tokenizer, reward_update, trainer_options=trainer_options)
        trainer.train()
        return trainer.state.log_history

    log = train("none", "none", reward_model=None, reward_funcs=length_reward)
    assert not any("verified_accuracy" in entry for entry in log)
    log = train("process", "process", step_verifier=parity_labels)
    assert any(entry.get("reward_model/num_examples", 0) > 0 for entry in log)
    with pytest.raises(ValueError, match="without `verifier` there are no right and wrong outputs"):
        train("outcome", "outcome")


def test_a_verifier_that_lacks_its_column_is_named(tmp_path, tokenizer):
    def needs_gold(completions, gold, **kwargs):
        return [1.0] * len(completions)

    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"verifier": needs_gold})
    with pytest.raises(ValueError, match="`verifier` needs what the data set does not have"):
        trainer.train()


@pytest.mark.parametrize("reward_update", ["outcome", "process"])
def test_a_saved_reward_model_scores_as_the_live_one(tmp_path, tokenizer, reward_update):
    trainer = make_iterative_trainer(tmp_path, tokenizer, reward_update)
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "output" / "reward_model"
    card = ModelCard.load(folder / "README.md")
    assert f"{reward_update}-reward-model" in card.data.tags
    assert str(tmp_path) not in card.content
    prompts, completions = ["Count 1:", "Count 2:"], ["1\n2", "3"]
    if reward_update == "outcome":
        assert OutcomeRewardModel(folder)(prompts, completions) == trainer.reward_model(prompts, completions)
    else:
        steps = [completion.split("\n") for completion in completions]
        assert ProcessRewardModel(folder).score(prompts, steps) == trainer.reward_model.score(prompts, steps)


def test_a_reward_model_of_adapters(tmp_path, tokenizer):
    reward_model = tiny_outcome_model(tokenizer)
    reward_model.model = get_peft_model(reward_model.model, LoraConfig(**LORA, task_type="SEQ_CLS"))
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"reward_model": reward_model}, **options)
    trainer.train()
    loaded = tiny_outcome_model(tokenizer)
    loaded.model = get_peft_model(loaded.model, LoraConfig(**LORA, task_type="SEQ_CLS"))
    again = make_iterative_trainer(tmp_path, tokenizer, trainer_options={"reward_model": loaded}, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-3"))
    assert_equal_weights(trainer.reward_model.model, again.reward_model.model)


def test_dynamic_sampling_keeps_all_that_it_sampled_and_carries_nothing_over_a_reward_update(tmp_path, tokenizer):
    trainer = make_iterative_trainer(tmp_path, tokenizer, dynamic_sampling=True, zero_advantage_tolerance=1.5)
    surplus_at_ends = []

    class AtStepEnd(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            surplus_at_ends.append((state.global_step, len(trainer._surplus)))

    trainer.add_callback(AtStepEnd())
    trainer.train()
    rows = [row for row in trainer.state.log_history if "dynamic_sampling/rounds" in row]
    assert sum(row["dynamic_sampling/rounds"] for row in rows) > 0
    files = trainer.rollouts.files()
    assert len(files) == len(rows) + sum(row["dynamic_sampling/rounds"] for row in rows)
    per_iteration = trainer.args.steps_per_rl_iteration
    assert all(count == 0 for step, count in surplus_at_ends if step % per_iteration == 0)
