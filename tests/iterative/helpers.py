import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

from trl_grpo_ext import IterativeGRPOConfig, IterativeGRPOTrainer, ProcessRewardModel
from trl_grpo_ext.iterative.outcome_reward_model import OutcomeRewardModel
from trl_grpo_ext.iterative.rollouts import Rollout

from ..tiny import prompt_dataset, save_tiny_model, tiny_model
from ..trainers.helpers import SETTINGS, cut_every_four


def parity_verifier(completion_ids, **kwargs):
    """A verdict that differs within a group of random completions."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def parity_labels(steps, **kwargs):
    return [[float(len(step) % 2) for step in completion] for completion in steps]


def tiny_scorer(tokenizer, model_class, num_labels):
    config = tiny_model(tokenizer).config.to_dict()
    torch.manual_seed(1)
    return model_class(LlamaConfig(**{**config, "num_labels": num_labels}))


def tiny_outcome_model(tokenizer, **options):
    return OutcomeRewardModel(
        tiny_scorer(tokenizer, LlamaForSequenceClassification, 1), tokenizer=tokenizer, **options
    )


def tiny_process_model(tokenizer, **options):
    model = tiny_scorer(tokenizer, LlamaForTokenClassification, 2)
    return ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification", **options)


def make_iterative_trainer(folder, tokenizer, reward_update="outcome", trainer_options=None, **options):
    """A trainer of a tiny policy loaded from a folder, three iterations of two steps."""
    settings = {
        **{name: value for name, value in SETTINGS.items() if name != "max_steps"},
        "beta": 0.1,
        "num_rl_iterations": 3,
        "steps_per_rl_iteration": 2,
        "reward_update": reward_update,
        "reward_model_learning_rate": 1e-3,
        "reward_model_batch_size": 4,
        "rollout_dir": str(folder / "rollouts"),
        **options,
    }
    trainer_options = dict(trainer_options or {})
    make_reward_model = tiny_outcome_model
    if settings.get("supervision") == "process" or reward_update == "process":
        settings["supervision"] = "process"
        trainer_options.setdefault("step_splitter", cut_every_four)
        make_reward_model = tiny_process_model
    if "reward_model" not in trainer_options:
        trainer_options["reward_model"] = make_reward_model(tokenizer)
    model = trainer_options.pop("model", None) or save_tiny_model(folder / "model")
    return IterativeGRPOTrainer(
        model,
        args=IterativeGRPOConfig(output_dir=str(folder / "output"), **settings),
        train_dataset=trainer_options.pop("train_dataset", None) or prompt_dataset(),
        processing_class=tokenizer,
        **{"verifier": parity_verifier, **trainer_options},
    )


def rollout(prompt="1 + 1?", completion="2", verified=1.0, **fields):
    values = {
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "steps": [completion],
        "step_ends": [0],
        "step_rewards": [0.5],
        "step_labels": [],
        "reward": 0.25,
        "solution": "2",
        "iteration": 0,
        "policy_step": 0,
        **fields,
    }
    return Rollout(prompt=prompt, completion=completion, verified=verified, **values)
