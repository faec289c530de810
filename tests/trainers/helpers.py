import functools

import torch

from trl_grpo_ext import GRPOExtConfig, GRPOExtTrainer


SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 1e-2,
    "max_steps": 2,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
# Two of the options that are on by default save work and change numbers by rounding, one is another denominator.
bitwise_config = functools.partial(
    GRPOExtConfig, efficient_microbatches=False, skip_zero_advantage=False, pool_generation_batches=False
)
# What a run measures of the clock rather than of the training.
TIMINGS = ("step_time", "runtime", "per_second", "flos")


def length_reward(completion_ids, **kwargs):
    """A reward that differs within a group of random completions."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def step_length_reward(steps, **kwargs):
    return [[float(len(step) % 5) for step in completion] for completion in steps]


def cut_every_four(text):
    return [text[start : start + 4] for start in range(0, len(text), 4)] or [""]


def make_trainer(
    tmp_path, model, dataset, tokenizer, trainer_class=GRPOExtTrainer, config_class=GRPOExtConfig, **options
):
    trainer_options = {
        name: options.pop(name)
        for name in (
            "step_reward_funcs",
            "step_reward_weights",
            "step_splitter",
            "peft_config",
            "eval_dataset",
            "rollout_func",
            "reward_funcs",
            "callbacks",
        )
        if name in options
    }
    trainer_options.setdefault("reward_funcs", length_reward)
    return trainer_class(
        model=model,
        args=config_class(output_dir=str(tmp_path), **{**SETTINGS, **options}),
        train_dataset=dataset,
        processing_class=tokenizer,
        **trainer_options,
    )


def process_options(**options):
    return {
        "supervision": "process",
        "step_reward_funcs": step_length_reward,
        "step_splitter": cut_every_four,
        **options,
    }


def generation_batch(trainer):
    """A batch as the trainer generates and scores it for an optimizer step, before it is shuffled."""
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._generate_and_score_completions(rows)


def completion_logits(model, batch):
    """Logits of the completion tokens from a plain forward pass, (B, T, V)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    return logits[:, -batch["completion_ids"].shape[1] - 1 : -1]


def completion_logps(model, batch):
    """Log probabilities of the completion tokens from a plain forward pass, (B, T)."""
    all_logps = completion_logits(model, batch).log_softmax(-1)
    return all_logps.gather(-1, batch["completion_ids"][..., None]).squeeze(-1)


def weight_gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def log_without_timings(trainer):
    return [
        {name: value for name, value in entry.items() if not any(timing in name for timing in TIMINGS)}
        for entry in trainer.state.log_history
    ]


def assert_equal_weights(first, second):
    for (name, ours), (_, theirs) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
