import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForTokenClassification

from trl_grpo_ext import PRMConfig, PRMTrainer, ProcessRewardModel
from trl_grpo_ext.prm.metrics import step_metrics

from ..tiny import tiny_tokenizer
from .helpers import assert_equal_weights


SETTINGS = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2, "logging_steps": 1,
    "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip


def tiny_classifier(num_labels=2, hidden_size=16):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=2, num_attention_heads=2, num_labels=num_labels, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForTokenClassification(config)


def rows(labels=None, num_rows=8):
    steps = [[f"{i} + {j} = {i + j}" for j in range(1 + i % 3)] for i in range(num_rows)]
    labels = labels or [[(i + j) % 2 == 0 for j in range(len(row))] for i, row in enumerate(steps)]
    prompts = [f"Add to {i}:" for i in range(num_rows)]
    return Dataset.from_dict({"prompt": prompts, "completions": steps, "labels": labels})


def make(tmp_path, dataset=None, model=None, **options):
    extra = {
        name: options.pop(name) for name in ("peft_config", "eval_dataset", "quantization_config") if name in options
    }
    return PRMTrainer(
        model if model is not None else tiny_classifier(),
        PRMConfig(str(tmp_path), **{**SETTINGS, **options}),
        dataset if dataset is not None else rows(),
        processing_class=tiny_tokenizer(),
        **extra,
    )


def loss_by_hand(model, dataset):
    """Cross-entropy of the two classes at the separators, tokenized by hand; soft labels as mixed targets."""
    tokenizer = tiny_tokenizer()
    losses = []
    for row in dataset:
        ids = tokenizer.encode(row["prompt"])
        for step, label in zip(row["completions"], row["labels"], strict=True):
            ids = ids + tokenizer.encode(step) + tokenizer.encode("\n")
            if label is not None:
                logits = model(torch.tensor([ids])).logits[0, -1]
                target = torch.tensor([1 - float(label), float(label)])
                losses.append(torch.nn.functional.cross_entropy(logits, target))
    return torch.stack(losses)


class TestLoss:
    @pytest.mark.parametrize("labels", ["hard", "soft", "some missing"])
    def test_is_the_cross_entropy_at_the_step_ends(self, tmp_path, labels):
        dataset = rows()
        if labels != "hard":
            soft = [[0.25 * (i + j) % 1 for j in range(len(row))] for i, row in enumerate(dataset["labels"])]
            if labels == "some missing":
                soft[2][1] = None
            dataset = rows(soft)
        trainer = make(tmp_path, dataset, eval_dataset=dataset)
        with torch.no_grad():
            expected = loss_by_hand(trainer.model, dataset).mean().item()
        # all rows in one batch: a mean over batches of unequal numbers of steps is not that over steps
        trainer.args.per_device_eval_batch_size = 8
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)

    def test_gradient_does_not_depend_on_the_cut_into_micro_batches(self, tmp_path):
        models = []
        for size, accumulation in ((8, 1), (4, 2), (1, 8)):
            trainer = make(
                tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=1,
                optim="sgd", learning_rate=0.5, max_grad_norm=0.0,
            )  # fmt: skip
            trainer.train()
            models.append(trainer.model)
        for model in models[1:]:
            for ours, theirs in zip(model.parameters(), models[0].parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)

    def test_trains_on_the_last_step_only(self, tmp_path):
        trainer = make(tmp_path, train_on_last_step_only=True)
        labelled = [[label for label in row if label != -100] for row in trainer.train_dataset["labels"]]
        assert labelled == [[float(row[-1])] for row in rows()["labels"]]

    def test_evaluates_all_steps_also_of_data_given_later(self, tmp_path):
        trainer = make(tmp_path, eval_dataset=rows(), train_on_last_step_only=True)
        given = trainer.evaluate()
        assert trainer.evaluate(rows())["eval_loss"] == given["eval_loss"]
        labelled = [label for row in trainer.eval_dataset["labels"] for label in row if label != -100]
        assert len(labelled) == sum(map(len, rows()["labels"]))
        assert trainer.predict(rows()).metrics["test_loss"] == given["eval_loss"]

    def test_takes_tokenized_rows_as_they_are(self, tmp_path):
        tokenized = make(tmp_path).train_dataset
        assert make(tmp_path, tokenized).train_dataset.to_list() == tokenized.to_list()

    def test_boolean_labels_keep_what_is_ignored(self, tmp_path):
        # cast back to the type of the column, -100 would be True
        assert {label for row in make(tmp_path).train_dataset["labels"] for label in row} == {-100.0, 0.0, 1.0}

    @pytest.mark.parametrize("moving", ["head", "body"])
    @pytest.mark.parametrize("adapters", [False, True])
    def test_the_head_has_a_learning_rate_of_its_own(self, tmp_path, moving, adapters):
        rates = {"learning_rate": 0.0, "head_learning_rate": 1e-2}
        if moving == "body":
            rates = {"learning_rate": 1e-2, "head_learning_rate": 0.0}
        peft_config = LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"]) if adapters else None
        trainer = make(tmp_path, peft_config=peft_config, **rates)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                is_moving = ("score" in name) == (moving == "head")
                assert torch.equal(parameter, before[name]) != is_moving or ".lora_A." in name, name
        assert len(trainer.lr_scheduler.base_lrs) == len(trainer.optimizer.param_groups)


class TestRoundTrip:
    def test_a_saved_model_scores_the_ids_it_was_trained_on(self, tmp_path):
        options = {"step_separator": "\n\n", "max_length": 40, "max_completion_length": 30}
        trainer = make(tmp_path / "run", **options)
        trainer.train()
        trainer.save_model(tmp_path / "prm")
        prm = ProcessRewardModel(str(tmp_path / "prm"))
        assert (prm.format.separator, prm.max_length, prm.max_completion_length) == ("\n\n", 40, 30)
        assert prm.step_splitter("a\nb\n\nc") == ["a\nb\n\n", "c"]
        assert ProcessRewardModel(str(tmp_path / "prm"), prm_format="pure").format.separator == "\n\n"
        seen = []
        forward = prm.model.forward
        prm.model.forward = lambda **inputs: (seen.append(inputs["input_ids"][0].tolist()), forward(**inputs))[1]
        prm.batch_size = 1
        dataset = rows()
        prm.score(dataset["prompt"], dataset["completions"])
        assert sorted(seen) == sorted(trainer.train_dataset["input_ids"])

    def test_steps_with_their_separators_are_read_as_those_without(self, tmp_path):
        trainer = make(tmp_path)
        trainer.save_model(tmp_path)
        prm = ProcessRewardModel(str(tmp_path))
        plain = [["1 + 1 = 2", "so 2"]]
        assert prm.score(["Add:"], [["1 + 1 = 2\n", "so 2"]]) == prm.score(["Add:"], plain)

    @pytest.mark.parametrize("modules_to_save", [None, ["score"], ["embed_tokens"]])
    @pytest.mark.parametrize("task_type", [None, "TOKEN_CLS", "CAUSAL_LM", "SEQ_CLS"])
    def test_adapters_are_saved_with_their_head(self, tmp_path, modules_to_save, task_type):
        base = tmp_path / "base"
        tiny_classifier().save_pretrained(base)
        tiny_tokenizer().save_pretrained(base)
        config = LoraConfig(task_type=task_type, target_modules=["q_proj"], modules_to_save=modules_to_save)
        trainer = make(tmp_path / "run", model=str(base), peft_config=config)
        trainer.train()
        trainer.save_model(tmp_path / "prm")
        assert not (tmp_path / "prm" / "model.safetensors").exists()
        prm = ProcessRewardModel(str(tmp_path / "prm"))
        dataset = rows()
        ours = ProcessRewardModel(trainer.model, tokenizer=tiny_tokenizer(), prm_format="token_classification")
        for row, other in zip(
            prm.score(dataset["prompt"], dataset["completions"]),
            ours.score(dataset["prompt"], dataset["completions"]),
            strict=True,
        ):
            assert row == pytest.approx(other, abs=1e-5)
        untrained = ProcessRewardModel(str(base))
        assert prm.score(["1"], [["2"]]) != untrained.score(["1"], [["2"]])

    def test_trains_adapters_on_a_quantized_base(self, tmp_path):
        base = tmp_path / "base"
        tiny_classifier(hidden_size=64).save_pretrained(base)
        tiny_tokenizer().save_pretrained(base)
        trainer = make(
            tmp_path / "run",
            model=str(base),
            peft_config=LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"]),
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            gradient_checkpointing=False,
        )
        layer = trainer.model.base_model.model.model.layers[0].mlp.down_proj
        assert layer.weight.dtype == torch.uint8
        before = layer.weight.clone()
        trainer.train()
        assert torch.equal(layer.weight, before)
        assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
        trainer.save_model(tmp_path / "prm")
        assert len(ProcessRewardModel(str(tmp_path / "prm")).score(["1"], [["2", "3"]])[0]) == 2

    def test_resumes_where_it_was(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "num_train_epochs": 5}
        whole = make(tmp_path / "whole", rows(num_rows=16), **options)
        whole.train()
        for folder in (
            tmp_path / "whole" / "checkpoint-1",
            tmp_path / "whole",
        ):  # checkpoints are pushed from the latter
            settings = json.loads((folder / "process_reward_model.json").read_text())
            assert settings["step_separator"] == "\n"
        resumed = make(tmp_path / "resumed", rows(num_rows=16), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
        assert_equal_weights(resumed.model, whole.model)

    def test_writes_a_model_card(self, tmp_path):
        trainer = make(tmp_path)
        trainer.create_model_card(dataset_name="someone/steps")  # as TRL's trainers are asked
        card = (tmp_path / "README.md").read_text()
        assert "## Process reward model" in card
        assert "| `step_separator` | `'\\n'` |" in card
        assert "trl_grpo_ext" in ModelCard.load(tmp_path / "README.md").data.tags


class TestMetrics:
    def test_are_computed_in_evaluation(self, tmp_path):
        metrics = make(tmp_path, eval_dataset=rows()).evaluate()
        for name in ("accuracy", "first_error_f1", "calibration_error", "base_rate"):
            assert 0 <= metrics[f"eval_{name}"] <= 1

    def test_of_a_known_case(self):
        # Three completions: the first error found, an error overlooked, and one without error
        scores = [[0.9, 0.2], [0.8, 0.7], [0.6, 0.9]]
        labels = [[1, 0], [1, 0], [1, 1]]
        metrics = step_metrics(scores, labels)
        assert metrics["accuracy"] == pytest.approx(5 / 6)
        assert (metrics["first_error_accuracy"], metrics["no_error_accuracy"]) == (0.5, 1.0)
        assert metrics["first_error_f1"] == pytest.approx(2 * 0.5 / 1.5)
        assert metrics["base_rate"] == pytest.approx(4 / 6)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30))
    def test_calibration_error_by_loops(self, pairs):
        scores, labels = ([pair[i] for pair in pairs] for i in (0, 1))
        gap = 0.0
        for low in range(10):
            inside = [i for i, score in enumerate(scores) if min(int(score * 10), 9) == low]
            if inside:
                gap += abs(np.mean([scores[i] for i in inside]) - np.mean([labels[i] for i in inside])) * len(inside)
        metrics = step_metrics([[score] for score in scores], [[label] for label in labels])
        assert metrics["calibration_error"] == pytest.approx(gap / len(pairs), abs=1e-9)


class TestErrors:
    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (Dataset.from_dict({"prompt": ["a"], "completions": [["b"]]}), "`train_dataset` has no column 'labels'"),
            (rows().select([]), "`train_dataset` has no rows"),
            (Dataset.from_dict({"prompt": ["a"], "completions": [["b"]], "labels": [[1, 0]]}), "Row 0 has 2 `labels`"),
            (Dataset.from_dict({"prompt": ["a"], "completions": [["b"]], "labels": [[3]]}), "Row 0 has the label 3"),
            (
                Dataset.from_dict({"prompt": ["a " * 3000], "completions": [["b"]], "labels": [[1]]}),
                "`train_dataset` has no labelled step within `max_length`",
            ),
        ],
    )
    def test_bad_data_is_refused(self, tmp_path, dataset, message):
        with pytest.raises(ValueError, match=message):
            make(tmp_path, dataset)

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (
                Dataset.from_dict({"prompt": ["a"], "completions": ["b"], "labels": [[1]]}),
                "Row 0 has the `completions`",
            ),
            (Dataset.from_dict({"prompt": ["a"], "completions": [["b"]], "labels": ["1"]}), "Row 0 has the `labels`"),
            (rows().to_iterable_dataset(), "`train_dataset` is a IterableDataset, but must be"),
        ],
    )
    def test_data_of_another_type_is_refused(self, tmp_path, dataset, message):
        with pytest.raises(TypeError, match=message):
            make(tmp_path, dataset)

    def test_a_model_without_head_is_refused(self, tmp_path, model):
        with pytest.raises(ValueError, match="`model` is a LlamaForCausalLM, which has no classification head"):
            make(tmp_path, model=model)

    def test_another_number_of_classes_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="`model` has 3 classes, but a step is either wrong or right"):
            make(tmp_path, model=tiny_classifier(num_labels=3))

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"max_length": 0}, "`max_length` is 0"), ({"step_separator": ""}, "`step_separator` is empty")],
    )
    def test_bad_values_are_refused(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            make(tmp_path, **options)
