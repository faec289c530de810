"""What a model card says of a run beyond TRL's: method, paper, base, data and the settings that matter."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


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
    "max_completion_length", "learning_rate", "max_steps", "num_train_epochs", "seed",
)  # fmt: skip


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
    values = {name: getattr(args, name, None) for name in SETTINGS}
    settings = [f"| `{name}` | `{value!r}` |" for name, value in values.items() if value is not None]
    section = [
        "## DeepSeekMath",
        "",
        f"- Method: {METHODS[getattr(args, 'supervision', 'outcome')]}",
        f"- Paper: {PAPER}",
        f"- Base model: {base_model}",
        f"- Data: {data}",
        "",
        "| setting | value |",
        "|---|---|",
        *settings,
        "",
        "### Framework versions",
    ]
    text = card.text.replace("### Framework versions", "\n".join(section), 1)
    # TRL writes None for what is not on the Hub
    text = text.replace("[None](https://huggingface.co/None)", base_model)
    card.text = text.replace('model="None"', f'model="{card_path.parent.name}"')
    card.save(card_path)
