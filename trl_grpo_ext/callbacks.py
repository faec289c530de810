"""What a run shows of itself: a line a log while it works, and a picture at the end."""

from pathlib import Path

from transformers import ProgressCallback


PROGRESS_METRICS = {
    "reward": "reward",
    "step reward": "step_reward",
    "held-out": "eval_reward",
    "verified": "verified_accuracy",
    "held-out verified": "eval_verified_accuracy",
    "reward model agrees": "reward_model/agreement",
    "KL": "kl",
    "length": "completions/mean_length",
    "entropy": "entropy",
}
Panels = dict[str, dict[str, str | None]]  # of each panel's title, the metrics drawn in it and their labels
PANELS: Panels = {
    "Reward (training)": {"reward": "completion", "step_reward": "step"},
    "Held-out accuracy (mean reward)": {"eval_reward": None},
    "KL to the reference (nats a token)": {"kl": None},
    "Completion length (tokens)": {"completions/mean_length": None},
}
ITERATION_PANELS: Panels = {
    "Verified accuracy": {"verified_accuracy": "training", "eval_verified_accuracy": "held-out"},
    "Reward model: agreement with the verifier": {
        "reward_model/before_update/agreement": "before its update",
        "reward_model/agreement": "after it",
    },
    "Reward that accuracy does not explain": {"reward_model/unexplained_reward": None},
    "KL to the reference (nats a token)": {"kl": None},
}


class CompactProgressCallback(ProgressCallback):
    """The progress bar of transformers with one short line a log instead of every metric."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        shown = {label: logs[name] for label, name in PROGRESS_METRICS.items() if logs.get(name) is not None}
        if shown:
            values = "  ".join(f"{label} {value:.3f}" for label, value in shown.items())
            self.training_bar.write(f"step {state.global_step:4d}  {values}")


def plot_training(log_history: list[dict], path: str | Path, title: str, panels: Panels = PANELS) -> None:
    """
    Draw metrics over steps, by default reward, held-out reward, KL and length.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        path (`str` or `Path`):
            Where to write the picture; the suffix names the format.
        title (`str`):
            Title of the picture.
        panels (`dict[str, dict[str, str | None]]`, *optional*):
            The four panels: of each title, the metrics drawn there and their labels.

    Raises:
        `ImportError`: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(title)
    for axes, (panel_title, metrics) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for metric, label in metrics.items():
            points = [(entry["step"], entry[metric]) for entry in log_history if entry.get(metric) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.set_title(panel_title)
        axes.set_xlabel("step")
        axes.margins(y=0.1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    figure.savefig(path, dpi=110)
