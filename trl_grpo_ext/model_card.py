"""What a model card says of a run beyond TRL's: method, paper, base, data and the settings that matter."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData


PAPER = "[DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models](https://huggingface.co/papers/2402.03300)"
METHODS = {
    "outcome": "GRPO with outcome supervision (section 4.1.2)",
    "process": "GRPO with process supervision (section 4.1.3)",
}
SETTINGS = (
    "supervision", "step_separator", "step_credit", "outcome_weight", "process_filter_keep", "loss_type",
    "importance_sampling_level", "advantage_baseline", "scale_rewards", "std_correction", "live_group_denominator",
    "beta", "kl_estimator", "kl_placement", "resolved_kl_gradient", "kl_target", "use_bias_correction_kl", "epsilon",
    "epsilon_high", "num_iterations", "num_generations", "generation_batch_size", "temperature",
    "max_completion_length", "learning_rate", "max_steps", "num_train_epochs", "seed", "num_rl_iterations",
    "steps_per_rl_iteration", "reward_update", "reference_update", "replay_ratio", "reward_model_learning_rate",
    "reward_model_epochs", "shared_base",
)  # fmt: skip
PRM_SETTINGS = (
    "step_separator", "max_length", "max_completion_length", "train_on_last_step_only", "learning_rate",
    "num_train_epochs", "max_steps", "seed",
)  # fmt: skip


def describe_prm_training(card_path: Path, base_model: str, tags: list[str], args: Any) -> None:
    """
    Add a section on the training to the model card of a process reward model.

    Of a base model in a local folder the card names no more than the folder: the Hub knows no path.

    Args:
        card_path (`Path`):
            The card, changed in place.
        base_model (`str`):
            What was trained: a Hub id or a local folder.
        tags (`list[str]`):
            Tags to add; for an adapter PEFT puts its own in the place of all others.
        args:
            The trainer's configuration; its [`PRM_SETTINGS`] are listed.
    """
    facts = [
        "- Method: process reward model, a classifier of steps at their separators, trained by "
        "`trl_grpo_ext.PRMTrainer`",
        "- Use: `ProcessRewardModel(...)` of `trl_grpo_ext` reads it as it was trained",
        f"- Base model: {Path(base_model).name or 'a model made in the script'}",
    ]
    card = ModelCard.load(card_path)
    tags = list(dict.fromkeys([*tags, *(card.data.tags or [])]))
    text = card.text.replace(" on the None dataset.", ".")  # transformers writes None for what has no name
    if base_model and Path(base_model).exists():
        card.data.base_model = None
        tags = [tag for tag in tags if base_model not in tag]
        text = text.replace(f"[{base_model}](https://huggingface.co/{base_model})", Path(base_model).name)
    card.data.tags = tags
    card.text = with_section(text, "## Process reward model", facts, settings_of(args, PRM_SETTINGS))
    card.save(card_path)


def settings_of(args: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def with_section(text: str, title: str, facts: list[str], settings: dict[str, Any]) -> str:
    """The card's text with a section before that on framework versions."""
    table = ["| setting | value |", "|---|---|", *(f"| `{name}` | `{value!r}` |" for name, value in settings.items())]
    section = "\n".join([title, "", *facts, "", *table, "", "### Framework versions"])
    return text.replace("### Framework versions", section, 1)


def describe_training(card_path: Path, base_model: str, data: str, args: Any) -> None:
    """
    Add a section on the training to a model card that TRL wrote.

    Args:
        card_path (`Path`):
            The card, changed in place.
        base_model (`str`):
            What was trained: a Hub id, or the name of a local folder.
        data (`str`):
            What it was trained on.
        args:
            The trainer's configuration; its [`SETTINGS`] are listed.
    """
    card = ModelCard.load(card_path)
    method = METHODS[getattr(args, "supervision", "outcome")]
    is_iterative = hasattr(args, "num_rl_iterations")
    facts = [
        f"- Method: {'iterative GRPO (Algorithm 1): ' if is_iterative else ''}{method}",
        f"- Paper: {PAPER}",
        f"- Base model: {base_model}",
        f"- Data: {data}",
    ]
    if is_iterative and args.reward_update != "none":
        facts.append("- Reward model: trained along, as it ended in `reward_model/`")
    text = with_section(card.text, "## DeepSeekMath", facts, settings_of(args, SETTINGS))
    # TRL writes None for what is not on the Hub
    text = text.replace("[None](https://huggingface.co/None)", base_model)
    card.text = text.replace('model="None"', f'model="{card_path.parent.name}"')
    card.save(card_path)


def write_reward_model_card(folder: Path, kind: str, use: str) -> None:
    """
    Write the model card of a reward model that was trained along with a policy.

    Args:
        folder (`Path`):
            The reward model's folder.
        kind (`str`):
            `"outcome"` or `"process"`.
        use (`str`):
            Name of the class that loads it.
    """
    text = "\n".join(
        [
            f"# {kind.capitalize()} reward model",
            "",
            "Trained along with a policy by iterative GRPO, with `trl_grpo_ext.IterativeGRPOTrainer`. It judges what "
            "that policy writes, and other texts the less the more they differ.",
            "",
            f"- Paper: {PAPER}",
            f"- Use: `{use}(...)` of `trl_grpo_ext` reads it as it was trained",
            "",
        ]
    )
    header = ModelCardData(tags=["trl_grpo_ext", "reward-model", f"{kind}-reward-model"]).to_yaml()
    ModelCard(f"---\n{header}\n---\n\n{text}").save(folder / "README.md")
