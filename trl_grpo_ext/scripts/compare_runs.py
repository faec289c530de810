r"""
Compare finished runs of the main job or of iterative GRPO: a table of accuracies and a picture of one metric.

    python -m trl_grpo_ext.scripts.compare_runs --output comparison.png --metric eval_verified_accuracy \
        "iterative=run-0,run-1,run-2" "frozen reward model=frozen-0,frozen-1,frozen-2"
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.trainer import TRAINER_STATE_NAME

from ..trainers.seams import last_complete_checkpoint


Runs = dict[str, list[Path]]


def parse_runs(arguments: list[str]) -> Runs:
    """Groups of run folders by label, from `label=folder,folder`."""
    runs = {}
    for argument in arguments:
        label, separator, folders = argument.partition("=")
        runs[label] = [Path(folder) for folder in folders.split(",")]
        missing = [folder for folder in runs[label] if not (folder / "results.json").exists()]
        if not separator or missing:
            raise ValueError(
                f"`runs` has {argument!r}, but must be label=folder,folder with folders of finished runs"
                f"{f' ({missing[0]} has no results.json)' if separator else ''}; correct it."
            )
    return runs


def results_table(runs: Runs) -> Table:
    """Accuracy before and after of each run, one row a metric and label."""
    table = Table(title="Accuracy on held-out problems, before → after (%)")
    results = {
        label: [json.loads((f / "results.json").read_text()) for f in folders] for label, folders in runs.items()
    }
    table.add_column("")
    table.add_column("")
    for index in range(max(map(len, results.values()))):
        table.add_column(f"run {index + 1}", justify="right")
    table.add_column("mean after", justify="right")
    metrics = [name for name in next(iter(results.values()))[0]["before"] if name != "num_problems"]
    for metric in metrics:
        for label, group in results.items():
            cells = [f"{100 * run['before'][metric]:.1f} → {100 * run['after'][metric]:.1f}" for run in group]
            mean = sum(run["after"][metric] for run in group) / len(group)
            table.add_row(metric, label, *cells, f"{100 * mean:.1f}")
    return table


def plot_metric(runs: Runs, metric: str, path: Path) -> None:
    """Draw a logged metric over steps, thin for each run and thick for the mean of each label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (label, folders) in enumerate(runs.items()):
        curves = [metric_of(folder, metric) for folder in folders]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), color=f"C{index}", alpha=0.3, linewidth=1)
        means = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
        axes.plot(steps, means, color=f"C{index}", marker="o", linewidth=2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def metric_of(folder: Path, metric: str) -> dict[int, float]:
    """A metric by step, from the log of a run's last checkpoint."""
    checkpoint = last_complete_checkpoint(folder)
    history = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())["log_history"] if checkpoint else []
    values = {entry["step"]: entry[metric] for entry in history if entry.get(metric) is not None}
    if not values:
        raise ValueError(
            f"`metric` is {metric!r}, which the last checkpoint of '{folder}' has not logged; name another one, or "
            "save checkpoints."
        )
    return values


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    parser = argparse.ArgumentParser(description="Compare finished runs.")
    parser.add_argument("runs", nargs="+", help="label=folder,folder of runs that are compared")
    parser.add_argument("--metric", default="eval_reward", help="logged metric to draw")
    parser.add_argument("--output", type=Path, default=Path("comparison.png"), help="picture to write")
    arguments = parser.parse_args(argv)
    runs = parse_runs(arguments.runs)
    plot_metric(runs, arguments.metric, arguments.output)
    Console().print(results_table(runs))


if __name__ == "__main__":
    run()
