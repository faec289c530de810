"""Groups of equal rewards are sampled again, and what is trained on is right."""

import copy

import pytest
import safetensors.torch
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GRPOExtTrainer

from ..tiny import prompt_dataset, save_tiny_model
from .helpers import length_reward, make_trainer, process_options


def equal_for_odd_prompts(prompts, completion_ids, **kwargs):
    """Rewards that differ within the groups of even prompts only."""
    rewards = length_reward(completion_ids)
    return [reward * (int(prompt.split()[1][:-1]) % 2 == 0) for prompt, reward in zip(prompts, rewards, strict=True)]


def constant(completion_ids, **kwargs):
    return [0.5] * len(completion_ids)


class Watched(GRPOExtTrainer):
    """Keeps what is trained on."""

    def sample_batch(self, inputs):
        batch = super().sample_batch(inputs)
        self.__dict__.setdefault("batches", []).append(batch)
        return batch


def make(folder, tokenizer, model, reward=equal_for_odd_prompts, **options):
    settings = {"dynamic_sampling": True, "num_generations": 4, "per_device_train_batch_size": 16, **options}
    return make_trainer(
        folder, model, prompt_dataset(12), tokenizer, trainer_class=Watched, reward_funcs=reward, **settings
    )


def metrics(trainer, name):
    return [row[f"dynamic_sampling/{name}"] for row in trainer.state.log_history if f"dynamic_sampling/{name}" in row]


def advantages_by_hand(batch):
    """Advantages from the ids alone, of groups of 4."""
    lengths = batch["completion_mask"].sum(1).tolist()
    ids = [row[:length].tolist() for row, length in zip(batch["completion_ids"], lengths, strict=True)]
    rewards = torch.tensor(length_reward(ids), dtype=torch.float64).view(-1, 4)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


@pytest.mark.parametrize("accumulation", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}])
def test_all_groups_that_are_trained_on_are_live_and_whole(tmp_path, tokenizer, model, accumulation):
    trainer = make(tmp_path, tokenizer, model, max_steps=3, **accumulation)
    trainer.train()
    assert sum(metrics(trainer, "refilled")) > 0
    assert metrics(trainer, "left") == [0, 0, 0]
    for batch in trainer.batches:
        assert batch["advantages"].view(-1, 4).abs().sum(1).min() > 0
        torch.testing.assert_close(batch["advantages"].double(), advantages_by_hand(batch), rtol=1e-4, atol=1e-4)
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        assert all(prompts[start : start + 4] == [prompts[start]] * 4 for start in range(0, 16, 4))
        assert batch["num_items_in_batch"].item() == batch["completion_mask"].sum().item()


def test_rounds_are_bounded_and_it_says_what_it_trains_on(tmp_path, tokenizer, model, caplog):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make(tmp_path, tokenizer, model, reward=constant, dynamic_sampling_max_rounds=3)
    trainer.train()
    assert metrics(trainer, "rounds") == [3, 3]
    assert metrics(trainer, "left") == [4, 4]
    assert caplog.text.count("After 3 rounds of dynamic sampling 4 groups still have equal rewards") == 1
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_it_stops_in_the_round_in_which_rewards_differ(tmp_path, tokenizer, model):
    calls = []

    def informative_from_the_third_time(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return constant(completion_ids) if len(calls) < 3 else list(range(len(completion_ids)))

    trainer = make(tmp_path, tokenizer, model, reward=informative_from_the_third_time, max_steps=1)
    trainer.train()
    assert calls == [16, 16, 16]
    assert metrics(trainer, "rounds") == [2]
    assert metrics(trainer, "refilled") == [4]


def live_in_turn(*calls):
    """Rewards that differ within the groups that are named 1, one string a call; in all of them afterwards."""
    remaining = list(calls)

    def reward(completion_ids, **kwargs):
        groups = remaining.pop(0) if remaining else "1" * len(completion_ids)
        return [int(groups[row // 4]) * length_reward([ids])[0] + row % 4 * int(groups[row // 4])
                for row, ids in enumerate(completion_ids)]  # fmt: skip

    return reward


def logps_under(trainer, weights, batch):
    trainer.model.load_state_dict(weights)
    return trainer.completion_logps(batch).masked_fill(batch["completion_mask"] == 0, 0)


def test_what_is_left_over_is_trained_on_next_with_the_policy_that_sampled_it(tmp_path, tokenizer, model):
    at_first = copy.deepcopy(model.state_dict())
    # Half of the first batch is live, so that twice as many as are missing are sampled; all of these are live
    reward = live_in_turn("1010", "1111", "0001")
    trainer = make(tmp_path, tokenizer, model, reward=reward, max_steps=2, learning_rate=0.1)
    at_second = {}

    class BeforeSecondStep(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            at_second.update(at_second or copy.deepcopy(model.state_dict()))

    trainer.add_callback(BeforeSecondStep())
    trainer.train()
    first, second = trainer.batches
    assert metrics(trainer, "rounds") == [1, 1]
    assert metrics(trainer, "refilled") == [2, 3]
    assert metrics(trainer, "kept")[0] == 2
    assert "old_per_token_logps" not in first
    old = second["old_per_token_logps"].masked_fill(second["completion_mask"] == 0, 0)
    expected = [logps_under(trainer, weights, second) for weights in (at_first, at_second)]
    assert (expected[0] - expected[1]).abs().max() > 0.01
    waited = torch.tensor([True] * 8 + [False] * 8)  # two groups in the first empty places
    torch.testing.assert_close(old[waited], expected[0][waited], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(old[~waited], expected[1][~waited], rtol=1e-4, atol=1e-4)


def steps_equal_for_odd_prompts(prompts, steps, **kwargs):
    odd = [int(prompt.split()[1][:-1]) % 2 for prompt in prompts]
    return [[0.5 if is_odd else float(len(step) % 5) for step in row] for is_odd, row in zip(odd, steps, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, process_options(step_reward_funcs=steps_equal_for_odd_prompts)], ids=["outcome", "process"]
)
def test_a_resumed_run_goes_on_with_its_prompts_and_with_what_was_left_over(tmp_path, tokenizer, options):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8, **options}

    def run(folder, **more):
        model = save_tiny_model(tmp_path / "model")
        trainer = make(folder, tokenizer, model, **settings, seed=1)
        trainer.train(**more)
        return trainer

    whole = run(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    state = safetensors.torch.load_file(checkpoint / "dynamic_sampling" / "surplus-000.safetensors")
    kept = metrics(whole, "kept")
    assert (len(state) > 0) == (kept[1] > 0)
    assert sum(kept) > 0
    resumed = run(tmp_path / "resumed", resume_from_checkpoint=str(checkpoint))
    for (name, first), (_, second) in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=0, atol=0, msg=name)


def test_a_second_training_starts_without_what_the_first_left_over(tmp_path, tokenizer, model):
    trainer = make(tmp_path, tokenizer, model, reward=live_in_turn("1010", "1111"), max_steps=1)
    trainer.train()
    assert len(trainer._surplus) == 2
    trainer.drop_buffered_completions()
    assert trainer._surplus == []


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo"])
def test_the_loss_is_that_of_trl_on_the_same_batch(tmp_path, tokenizer, model, loss_type):
    ours = make(tmp_path, tokenizer, model, loss_type=loss_type, max_steps=1)
    theirs = make_trainer(
        tmp_path, model, prompt_dataset(12), tokenizer, trainer_class=GRPOTrainer, config_class=GRPOConfig,
        num_generations=4, per_device_train_batch_size=16, loss_type=loss_type,
    )  # fmt: skip
    ours.model.train()
    batch = ours.sample_batch([ours.train_dataset[row] for row in range(4) for _ in range(4)])
    assert ours._metrics["train"]["dynamic_sampling/refilled"][0] > 0
    losses = []
    for trainer in (ours, theirs):
        trainer.model.train()
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])
        losses.append((loss.item(), norm.item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


def test_an_infinite_reward_is_no_reward(tmp_path, tokenizer, model):
    def infinite_once(completion_ids, **kwargs):
        return [float("inf"), *length_reward(completion_ids[1:])]

    trainer = make(tmp_path, tokenizer, model, reward=infinite_once)
    trainer.train()
    assert all(batch["advantages"].isfinite().all() for batch in trainer.batches)
    assert trainer.batches[0]["advantages"][0] == 0
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_data_of_which_no_further_prompts_can_be_drawn_is_refused(tmp_path, tokenizer, model):
    options = {"dynamic_sampling": True, "num_generations": 4}
    with pytest.raises(ValueError, match="`dynamic_sampling` is True, but `train_dataset` is a IterableDataset"):
        make_trainer(tmp_path, model, prompt_dataset().to_iterable_dataset(), tokenizer, **options)


def test_evaluation_samples_once(tmp_path, tokenizer, model):
    trainer = make(tmp_path, tokenizer, model, reward=constant, eval_dataset=prompt_dataset(4))
    trainer.evaluate()
    assert not any("dynamic_sampling" in name for name in trainer.state.log_history[-1])
