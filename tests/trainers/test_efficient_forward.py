"""What saves work changes no number but by rounding, and does save it."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext.batching import RowGroup
from trl_grpo_ext.trainers import efficient_forward

from ..tiny import prompt_dataset, save_tiny_model
from .helpers import TIMINGS, bitwise_config, length_reward, make_trainer, process_options


pytestmark = pytest.mark.usefixtures("free_passes")


def with_tool_results(prompts, trainer):
    """Completions of many lengths with tokens that the policy has not sampled; every fourth is not ended."""
    rng = np.random.default_rng(trainer.state.global_step)
    end = trainer.processing_class.eos_token_id
    completions = [
        [*rng.integers(120, 250, length).tolist(), end if index % 4 else 120]
        for index, length in enumerate(rng.integers(4, 12, len(prompts)))
    ]
    return {
        "prompt_ids": [trainer.processing_class.encode(prompt) for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": [[1, 0, 0, *[1] * (len(ids) - 3)] for ids in completions],
    }


LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
OPTIONS = {
    "outcome": {},
    "KL": {"beta": 0.04},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4},
    "truncated completions masked": {"mask_truncated_completions": True},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {
        "entropy_coef": 0.01,
        "use_adaptive_entropy": True,
        "entropy_target": 15.0,
        "gradient_accumulation_steps": 2,
    },
    "padding to a multiple": {"pad_to_multiple_of": 8},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "beta": 0.04},
    "tool mask": {"rollout_func": with_tool_results, "beta": 0.04},
    "process, tool mask": process_options(rollout_func=with_tool_results),
    "process": process_options(),
    "process, KL in the reward": process_options(beta=0.04, kl_estimator="k1", kl_placement="reward"),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def all_same_in_every_other_group(prompts, completion_ids, **kwargs):
    rewards = [float(sum(ids) % 7) for ids in completion_ids]
    return [0.5 if int(p.split()[1].rstrip(":")) % 2 else r for p, r in zip(prompts, rewards, strict=True)]


def train(folder, tokenizer, model, *classes, train_dataset=None, **options):
    """By plain SGD, so that rounding stays rounding."""
    options = {"optim": "sgd", "learning_rate": 0.1, "reward_funcs": all_same_in_every_other_group, **options}
    options.setdefault("num_generations", 2)
    trainer = make_trainer(folder, model, train_dataset or prompt_dataset(), tokenizer, *classes, **options)
    trainer.train()
    return trainer


def assert_equal_training(ours, theirs, but=()):
    for first, second in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for name, value in second.items():
            if not name.startswith(but) and not any(word in name for word in TIMINGS):
                assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    for (name, ours_p), (_, theirs_p) in zip(
        ours.model.state_dict().items(), theirs.model.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", ["outcome", "two iterations", "process"])
def test_every_loss_is_the_same(tmp_path, tokenizer, model_path, loss_type, name):
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    if name == "process" and loss_type in ("luspo", "vespo"):
        pytest.skip("refused: their weights are of whole completions")
    options = {**OPTIONS[name], "loss_type": loss_type, **level}
    ours = train(tmp_path / "ours", tokenizer, model_path, **options)
    plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
    assert_equal_training(ours, plain)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_same(tmp_path, tokenizer, model_path, name):
    ours = train(tmp_path / "ours", tokenizer, model_path, **OPTIONS[name])
    plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **OPTIONS[name])
    assert_equal_training(ours, plain)


@pytest.mark.parametrize("name", ["outcome", "KL", "two iterations"])
def test_it_equals_trl(tmp_path, tokenizer, model_path, name):
    ours = train(tmp_path / "ours", tokenizer, model_path, **OPTIONS[name])
    theirs = train(tmp_path / "theirs", tokenizer, model_path, GRPOTrainer, GRPOConfig, **OPTIONS[name])
    assert_equal_training(ours, theirs)


OF_MICROBATCHES = ("kl", "entropy", "clip_ratio", "cispo_clip_ratio", "vespo")  # metrics that are means over them
REGROUPED = {
    "outcome": {},
    "process": process_options(),
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "tool mask": {"rollout_func": with_tool_results},
    "KL, LoRA": OPTIONS["LoRA"],
    "two steps a generation": {"steps_per_generation": 8},
    "two generations a step": {"steps_per_generation": 2, "pool_generation_batches": True},
}


@pytest.mark.parametrize(
    ("loss_type", "name"),
    [(loss_type, "outcome") for loss_type in LOSS_TYPES if loss_type != "bnpo"]
    + [("dapo", name) for name in REGROUPED],
)
def test_rows_that_move_within_an_optimizer_step_change_no_number_of_it(
    tmp_path, tokenizer, model_path, loss_type, name
):
    options = {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "loss_type": loss_type,
        "importance_sampling_level": "sequence" if loss_type == "luspo" else "token",
        **REGROUPED[name],
    }
    ours = train(tmp_path / "ours", tokenizer, model_path, **{**options, "regroup_microbatches": True})
    plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
    assert_equal_training(ours, plain, but=OF_MICROBATCHES)


@pytest.mark.parametrize("prompts", ["short", "long"])
def test_rows_that_move_save_work(tmp_path, tokenizer, model_path, monkeypatch, prompts):
    if prompts == "short":  # and no micro-batch is cut any further
        monkeypatch.setattr("trl_grpo_ext.batching.PASS_TOKENS", 512)
    options = {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "max_completion_length": 40,
        "skip_zero_advantage": False,
        "train_dataset": LONG_PROMPTS if prompts == "long" else prompt_dataset(),
    }
    calls, _ = recorded(tmp_path, tokenizer, model_path, **options)
    fewer, _ = recorded(tmp_path, tokenizer, model_path, **options, regroup_microbatches=True)
    tokens, less = (
        sum(rows * length for rows, length, has_gradient in each if has_gradient) for each in (calls, fewer)
    )
    assert less < 0.85 * tokens


def test_what_is_of_whole_microbatches_is_not_regrouped(tmp_path, tokenizer, model_path, monkeypatch):
    monkeypatch.setattr(efficient_forward.EfficientForward, "reads_images", True)
    with pytest.raises(ValueError, match="`regroup_microbatches` is True, but the policy reads images"):
        train(tmp_path, tokenizer, model_path, gradient_accumulation_steps=2, regroup_microbatches=True)


def test_a_routers_loss_is_not_regrouped(tmp_path, tokenizer):
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, router_aux_loss_coef=0.01, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`regroup_microbatches` is True, but the router's loss is of a micro-batch"):
        train(tmp_path, tokenizer, str(tmp_path / "model"), gradient_accumulation_steps=2, regroup_microbatches=True)


LONG_PROMPTS = Dataset.from_dict({"prompt": [f"Count {index}: " + "one two three " * 4 for index in range(8)]})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_is_the_same_with_prompts_computed_once(tmp_path, tokenizer, model_path, loss_type):
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    options = {"loss_type": loss_type, "num_generations": 4, "train_dataset": LONG_PROMPTS, **level}
    ours = train(tmp_path / "ours", tokenizer, model_path, **options)
    assert ours.can_share_prompts
    assert_equal_training(
        ours, train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_same_with_prompts_computed_once(tmp_path, tokenizer, model_path, name):
    options = {"num_generations": 4, "train_dataset": LONG_PROMPTS, **OPTIONS[name]}
    ours = train(tmp_path / "ours", tokenizer, model_path, **options)
    assert ours.can_share_prompts or name == "gradient checkpointing"
    assert_equal_training(
        ours, train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
    )


class TestSharedPrompts:
    def test_the_prompt_of_a_group_is_computed_once(self, tmp_path, tokenizer, model_path):
        options = {
            "num_generations": 8,
            "train_dataset": LONG_PROMPTS,
            "skip_zero_advantage": False,
            "reward_funcs": length_reward,
        }
        calls, log = recorded(tmp_path, tokenizer, model_path, **options)
        plain, _ = recorded(tmp_path, tokenizer, model_path, **options, efficient_microbatches=False)
        ((rows, length, _),) = plain
        computed = sum(rows * length for rows, length, has_gradient in calls if has_gradient)
        prompt_length = length - round(log["completions/max_length"])
        assert computed < 0.7 * rows * length
        assert computed <= prompt_length + rows * (1 + log["completions/max_length"])

    @pytest.mark.parametrize("options", [{"bf16": True}, {"model_init_kwargs": {"dtype": "bfloat16"}}])
    def test_prompts_are_shared_in_half_precision(self, tmp_path, tokenizer, model_path, options):
        options = {"num_generations": 4, "train_dataset": LONG_PROMPTS, **options}
        ours = train(tmp_path / "ours", tokenizer, model_path, **options)
        assert ours.can_share_prompts
        plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
        for first, second in zip(ours.state.log_history[:2], plain.state.log_history[:2], strict=True):
            assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=0.05)
            assert first["entropy"] == pytest.approx(second["entropy"], rel=0.01)

    def test_a_model_that_cannot_is_given_whole_rows_and_says_so(
        self, tmp_path, tokenizer, model_path, monkeypatch, caplog
    ):
        def refuse(*args, **kwargs):
            raise TypeError("no such argument")

        monkeypatch.setattr(efficient_forward.SharedPrefix, "__call__", refuse)
        options = {"num_generations": 4, "train_dataset": LONG_PROMPTS}
        ours = train(tmp_path / "ours", tokenizer, model_path, **options)
        assert ours.can_share_prompts is False
        assert caplog.text.count("the model refused (no such argument)") == 1
        assert_equal_training(
            ours, train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
        )

    def test_a_model_that_forgets_the_past_is_given_whole_rows(
        self, tmp_path, tokenizer, model_path, monkeypatch, caplog
    ):
        def forgetful(self, input_ids, attention_mask, labels, **kwargs):
            columns = slice(self.prefix_length, None)
            return self.model(
                input_ids=input_ids[:, columns], attention_mask=attention_mask[:, columns], labels=labels[:, columns],
                **kwargs,
            )  # fmt: skip

        monkeypatch.setattr(efficient_forward.SharedPrefix, "__call__", forgetful)
        ours = train(tmp_path / "ours", tokenizer, model_path, num_generations=4, train_dataset=LONG_PROMPTS)
        assert ours.can_share_prompts is False
        assert caplog.text.count("log probabilities differ by") == 1

    def test_a_wrong_past_would_be_seen(self, tmp_path, tokenizer, model_path, monkeypatch):
        """The tests above do compare what goes through it."""
        options = {"num_generations": 4, "train_dataset": LONG_PROMPTS}
        plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config, **options)
        monkeypatch.setattr(efficient_forward.EfficientForward, "can_share_prompts", True)
        call = efficient_forward.SharedPrefix.__call__

        def with_another_first_token(self, input_ids, **kwargs):
            return call(self, input_ids=input_ids.index_fill(1, torch.tensor([0]), 20), **kwargs)

        monkeypatch.setattr(efficient_forward.SharedPrefix, "__call__", with_another_first_token)
        with pytest.raises(AssertionError):
            assert_equal_training(train(tmp_path / "ours", tokenizer, model_path, **options), plain)


class ForwardRecorder:
    """Shape of each forward pass of the policy, and whether it has a gradient."""

    def __init__(self, trainer):
        self.calls = []
        trainer.model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, model, args, kwargs):
        is_prompt = kwargs.get("use_cache") and torch.is_grad_enabled()
        if "labels" in kwargs or is_prompt:  # not the passes of sampling
            self.calls.append((*kwargs["input_ids"].shape, torch.is_grad_enabled()))


def recorded(folder, tokenizer, model_path, train_dataset=None, **options):
    options = {"num_generations": 2, "max_steps": 1, "reward_funcs": all_same_in_every_other_group, **options}
    trainer = make_trainer(folder, model_path, train_dataset or prompt_dataset(), tokenizer, **options)
    recorder = ForwardRecorder(trainer)
    trainer.train()
    return recorder.calls, trainer.state.log_history[0]


@pytest.fixture
def whole_rows(monkeypatch):
    """Prompts are short in most tests, and would be shared only since a further pass costs nothing here."""
    monkeypatch.setattr(efficient_forward.EfficientForward, "can_share_prompts", False)


@pytest.mark.usefixtures("whole_rows")
def test_padding_is_not_computed(tmp_path, tokenizer, model_path):
    calls, log = recorded(tmp_path, tokenizer, model_path, skip_zero_advantage=False)
    plain, _ = recorded(tmp_path, tokenizer, model_path, skip_zero_advantage=False, efficient_microbatches=False)
    assert len(plain) == 1 < len(calls)
    tokens, padded = (sum(rows * length for rows, length, _ in each) for each in (calls, plain))
    assert log["num_tokens"] <= tokens < 0.9 * padded


def test_rows_without_advantage_have_no_backward_pass(tmp_path, tokenizer, model_path):
    calls, log = recorded(tmp_path, tokenizer, model_path, efficient_microbatches=False)
    without = log["frac_reward_zero_std"] * 8
    assert without in (2, 4, 6)
    assert sum(rows for rows, _, has_gradient in calls if not has_gradient) == without
    assert sum(rows for rows, _, has_gradient in calls if has_gradient) == 8 - without


@pytest.mark.usefixtures("whole_rows")
@pytest.mark.parametrize("options", [{"beta": 0.04}, {"entropy_coef": 0.01}, {"skip_zero_advantage": False}])
def test_what_trains_without_advantage_is_not_skipped(tmp_path, tokenizer, model_path, options):
    calls, _ = recorded(tmp_path, tokenizer, model_path, efficient_microbatches=False, **options)
    assert sum(rows for rows, _, has_gradient in calls if has_gradient) == 8


def test_a_batch_without_any_advantage_still_has_a_backward_pass(tmp_path, tokenizer, model_path):
    calls, log = recorded(tmp_path, tokenizer, model_path, reward_funcs=lambda completions, **_: [1.0] * 8)
    assert sum(rows for rows, _, has_gradient in calls if has_gradient) == 1
    assert log["grad_norm"] == 0


def test_absolute_positions_are_not_moved(tmp_path, tokenizer):
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=128, initializer_range=0.2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(tmp_path / "gpt2")  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "gpt2")
    ours = train(tmp_path / "ours", tokenizer, str(tmp_path / "gpt2"))
    plain = train(tmp_path / "plain", tokenizer, str(tmp_path / "gpt2"), config_class=bitwise_config)
    assert_equal_training(ours, plain)


def test_with_the_exact_kl_all_is_forwarded_at_once(tmp_path, tokenizer, model_path):
    calls, _ = recorded(tmp_path, tokenizer, model_path, beta=0.04, kl_estimator="exact")
    assert [rows for rows, _, _ in calls] == [8]


def test_groups_are_used(tmp_path, tokenizer, model_path, monkeypatch):
    """A wrong group is seen: the tests above do compare what goes through them."""
    cut = efficient_forward.length_groups

    def too_short(*args):
        return [RowGroup(group.rows, group.start, max(group.end - 2, 1)) for group in cut(*args)]

    plain = train(tmp_path / "plain", tokenizer, model_path, config_class=bitwise_config)
    monkeypatch.setattr(efficient_forward, "length_groups", too_short)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal_training(train(tmp_path / "ours", tokenizer, model_path), plain)
