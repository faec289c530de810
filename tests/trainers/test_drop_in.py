"""
What TRL's trainer takes, ours takes and treats alike: data, rewards, tools, evaluation, resume, adapters.

Side by side with `trl.GRPOTrainer`: equal logs and equal weights, bit for bit.
"""

import copy
import functools
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, LlamaConfig
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from trl_grpo_ext import GRPOExtTrainer
from trl_grpo_ext.trainers.dynamic_sampling import DynamicSampling
from trl_grpo_ext.trainers.efficient_forward import EfficientForward
from trl_grpo_ext.trainers.loss_options import LossOptions
from trl_grpo_ext.trainers.pushing import PushesSafely
from trl_grpo_ext.trainers.seams import GRPOSeams

from ..tiny import prompt_dataset, save_tiny_model, tiny_model, tiny_tokenizer
from .helpers import (
    SETTINGS,
    assert_equal_weights,
    bitwise_config,
    generation_batch,
    length_reward,
    log_without_timings,
    make_trainer,
    process_options,
    step_length_reward,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def conversational_dataset():
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Count {index}:"}] for index in range(8)]})


def message_reward(completions, **kwargs):
    return [float(len(messages[0]["content"]) % 5) for messages in completions]


def sometimes_none(completion_ids, **kwargs):
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 7) for ids in completion_ids]


async def asynchronous_reward(completion_ids, **kwargs):
    return [float(ids[0] % 3) for ids in completion_ids]


def fixed_rollout(prompts, trainer):
    """Completions of given tokens, of which the third and fourth come from an environment."""
    tokenizer = trainer.processing_class
    ids = tokenizer.encode("one two three four five six")
    lengths = [len(ids) - index % 3 for index, _ in enumerate(prompts)]
    return {
        "prompt_ids": [tokenizer.encode(prompt) for prompt in prompts],
        "completion_ids": [ids[:length] for length in lengths],
        "logprobs": None,
        "env_mask": [[1, 1, 0, 0, *[1] * (length - 4)] for length in lengths],
    }


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
CASES = {
    "conversational": {"dataset": conversational_dataset, "reward_funcs": message_reward},
    "streaming": {"dataset": lambda: prompt_dataset().to_iterable_dataset()},
    "several rewards": {"reward_funcs": [length_reward, sometimes_none], "reward_weights": [0.3, 0.7]},
    "rewards normalized first": {
        "reward_funcs": [length_reward, sometimes_none], "multi_objective_aggregation": "normalize_then_sum"
    },
    "rewards that may be None": {"reward_funcs": sometimes_none},
    "asynchronous rewards": {"reward_funcs": [asynchronous_reward, length_reward]},
    "evaluation": {
        "eval_dataset": prompt_dataset, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
    },
    "rollouts with environment tokens": {"rollout_func": fixed_rollout, "beta": 0.04},
    "LoRA": {"peft_config": LORA, "beta": 0.04, "loss_type": "grpo", "use_bias_correction_kl": False},
    "LoRA, two iterations": {"peft_config": LORA, "beta": 0.04, "num_iterations": 2, "max_steps": 4},
    "LoRA, sequence level": {"peft_config": LORA, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "LoRA, entropy and clip-higher": {"peft_config": LORA, "entropy_coef": 0.01, "epsilon_high": 0.28},
    "gradient checkpointing": {"gradient_checkpointing": True, "beta": 0.04},
}  # fmt: skip


def trainer_of(tmp_path, model_path, tokenizer, classes, options):
    options = dict(options)
    dataset = options.pop("dataset", prompt_dataset)()
    if "peft_config" in options:
        options["peft_config"] = LoraConfig(**options["peft_config"])
    if "eval_dataset" in options:
        options["eval_dataset"] = options["eval_dataset"]()
    return make_trainer(tmp_path, model_path, dataset, tokenizer, *classes, **options)


def assert_same_training(ours, theirs):
    assert log_without_timings(ours) == log_without_timings(theirs)
    assert_equal_weights(ours.model, theirs.model)
    assert any(entry.get("grad_norm", 0) > 0 for entry in ours.state.log_history)


OURS, THEIRS = (GRPOExtTrainer, bitwise_config), (GRPOTrainer, GRPOConfig)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_trl(tmp_path, model_path, tokenizer, name):
    trainers = []
    for classes in (OURS, THEIRS):
        trainer = trainer_of(tmp_path / classes[0].__name__, model_path, tokenizer, classes, CASES[name])
        trainer.train()
        trainers.append(trainer)
    assert_same_training(*trainers)


def test_resumes_as_trl(tmp_path, model_path, tokenizer):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "beta": 0.04}
    trainers = []
    for classes in (OURS, THEIRS):
        folder = tmp_path / classes[0].__name__
        trainer_of(folder, model_path, tokenizer, classes, options).train()
        resumed = trainer_of(folder, model_path, tokenizer, classes, options)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        assert resumed.state.global_step == 3
        trainers.append(resumed)
    assert_same_training(*trainers)


def test_takes_a_reward_model_and_trls_arguments_by_position(tmp_path, model_path, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    reward_model = AutoModelForSequenceClassification.from_config(config)
    trainers = []
    for trainer_class, config_class in (OURS, THEIRS):
        args = config_class(
            output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
            max_steps=1, logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        )  # fmt: skip
        trainer = trainer_class(model_path, reward_model, args, prompt_dataset(), None, tokenizer, tokenizer)
        trainer.train()
        trainers.append(trainer)
    assert_same_training(*trainers)


class TestTools:
    """A model that calls a tool in half of its completions, and answers once it has the result."""

    @pytest.fixture
    def tool_tokenizer(self):
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
        tokenizer.chat_template = qwen3_chat_template
        return tokenizer

    @pytest.fixture
    def tool_model_path(self, tmp_path, tool_tokenizer):
        model = tiny_model(tool_tokenizer)
        model.config.max_position_embeddings = 1024  # TRL drops the results of tools that do not fit
        model.save_pretrained(tmp_path / "tool_model")
        return str(tmp_path / "tool_model")

    def write(self, trainer, tokenizer):
        """Stand in for the model's `generate`: a call of the tool first, and an answer where one was called."""

        def pad(rows):
            longest = max(map(len, rows))
            return torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])

        def generate(input_ids, **kwargs):
            call = '<tool_call>\n{"name": "double", "arguments": {"number": %d}}\n</tool_call><|im_end|>'
            after_tool = "tool_response" in tokenizer.decode(input_ids[0])
            texts = [
                f"It is {index}.<|im_end|>" if after_tool or index % 2 else call % index
                for index in range(len(input_ids))
            ]
            return torch.cat([input_ids, pad([tokenizer.encode(text) for text in texts])], dim=1)

        return patch.object(trainer.model, "generate", side_effect=generate)

    def arguments(self, tmp_path, config_class, **options):
        return config_class(str(tmp_path), **{**SETTINGS, "max_completion_length": 256, "max_steps": 1, **options})

    def make(self, tmp_path, model_path, tokenizer, trainer_class, config_class, **options):
        def double(number: int) -> int:
            """
            Double a number.

            Args:
                number: The number.

            Returns:
                Twice the number.
            """
            return 2 * number

        extra = {name: options.pop(name) for name in ("step_reward_funcs", "step_splitter") if name in options}
        args = self.arguments(tmp_path, config_class, **options)
        return trainer_class(
            model_path,
            length_reward,
            args,
            conversational_dataset(),
            processing_class=tokenizer,
            tools=[double],
            **extra,
        )

    def test_trains_as_trl(self, tmp_path, tool_model_path, tool_tokenizer):
        trainers = []
        for classes in (OURS, THEIRS):
            trainer = self.make(tmp_path, tool_model_path, tool_tokenizer, *classes)
            with self.write(trainer, tool_tokenizer):
                trainer.train()
            trainers.append(trainer)
        assert trainers[0].state.log_history[0]["tools/call_frequency"] == 0.5
        assert_same_training(*trainers)

    @pytest.mark.parametrize("kl", [{}, {"kl_estimator": "k1", "kl_placement": "reward"}])
    def test_what_a_tool_wrote_has_no_advantage(self, tmp_path, tool_model_path, tool_tokenizer, kl):
        trainer = self.make(
            tmp_path, tool_model_path, tool_tokenizer, *OURS, supervision="process", beta=0.04,
            step_reward_funcs=step_length_reward, step_splitter=process_options()["step_splitter"], **kl,
        )  # fmt: skip
        with self.write(trainer, tool_tokenizer):
            batch = generation_batch(trainer)
        by_tool = (batch["tool_mask"] == 0) & (batch["completion_mask"] == 1)
        assert by_tool.any()
        assert not batch["advantages"][by_tool].any()
        assert batch["advantages"][~by_tool].any()

    def test_environments_are_taken(self, tmp_path, tool_model_path, tool_tokenizer):
        class Counter:
            def reset(self, **kwargs):
                return "Count."

            def double(self, number: int) -> int:
                """
                Double a number.

                Args:
                    number: The number.

                Returns:
                    Twice the number.
                """
                return 2 * number

        trainers = []
        for trainer_class, config_class in (OURS, THEIRS):
            args = self.arguments(tmp_path, config_class)
            trainer = trainer_class(
                tool_model_path, length_reward, args, conversational_dataset(), processing_class=tool_tokenizer,
                environment_factory=Counter,
            )  # fmt: skip
            with self.write(trainer, tool_tokenizer):
                trainer.train()
            trainers.append(trainer)
        assert_same_training(*trainers)


class TestWithoutInit:
    """Hooks called on an object made without `__init__`, as TRL's tests do, find defaults in the class."""

    def test_class_level_defaults(self):
        trainer = object.__new__(GRPOExtTrainer)
        assert trainer.supervision == "outcome"
        assert trainer.step_scorer is None
        assert not any((trainer.extends_loss, trainer.replaces_kl, trainer.needs_hidden_states))
        assert trainer._generation_batches == []
        trainer.before_rewards([], [], [], [])

    def test_rewards_are_calculated_by_trl(self):
        trainer = object.__new__(GRPOExtTrainer)
        with patch.object(GRPOTrainer, "_calculate_rewards", return_value=torch.ones(2, 1)) as parent:
            rewards = trainer._calculate_rewards([], [], [], [])
        parent.assert_called_once()
        assert torch.equal(rewards, torch.ones(2, 1))

    @pytest.mark.parametrize("method", ["_compute_loss", "_get_per_token_logps_and_entropies"])
    def test_the_loss_is_trls(self, method):
        trainer = object.__new__(GRPOExtTrainer)
        with patch.object(GRPOTrainer, method, return_value="trl's") as parent:
            assert getattr(trainer, method)(None, {}) == "trl's"
        parent.assert_called_once()

    def test_inputs_are_those_of_trl(self):
        trainer = object.__new__(GRPOExtTrainer)
        with patch.object(GRPOTrainer, "_prepare_inputs", return_value="trl's"):
            assert trainer._prepare_inputs([]) == "trl's"

    def test_a_hook_that_is_overridden_is_called(self, tmp_path, model_path, tokenizer):
        class Doubled(GRPOExtTrainer):
            def batch_advantages(self, batch):
                return 2 * super().batch_advantages(batch)

        batches = []
        for trainer_class in (GRPOExtTrainer, Doubled):
            trainer = make_trainer(
                tmp_path, model_path, prompt_dataset(), tokenizer, functools.partial(trainer_class), std_correction=0
            )
            batches.append(generation_batch(trainer)["advantages"])
        assert torch.equal(2 * batches[0], batches[1])

    def test_the_chain_of_classes(self):
        assert [cls.__name__ for cls in GRPOExtTrainer.__mro__[:7]] == [
            "GRPOExtTrainer", PushesSafely.__name__, DynamicSampling.__name__, LossOptions.__name__,
            EfficientForward.__name__, GRPOSeams.__name__, "GRPOTrainer",
        ]  # fmt: skip
