"""
Kill a run with SIGKILL at random moments of each stage, resume it, and compare its end with the uninterrupted run's.

Run as `python -m tests.trainers.kill_and_resume FOLDER NUM_KILLS SEED`. Each run is a forked process; this one only
forks and compares, so that no thread of a library is lost on the way.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow.parquet
import torch
from safetensors.torch import load_file

from trl_grpo_ext.trainers.seams import last_complete_checkpoint

from ..iterative.helpers import make_iterative_trainer
from ..tiny import prompt_dataset, tiny_tokenizer


STAGES = ("sampling", "policy step", "labelling", "reward update", "saving")


def announced(function, stage, pipe):
    def call(*args, **kwargs):
        os.write(pipe, f"{stage}\n".encode())
        return function(*args, **kwargs)

    return call


def run(folder: Path, pipe: int) -> None:
    """Train or resume, telling on a pipe which stage begins."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = make_iterative_trainer(
        folder,
        tiny_tokenizer(),
        "process",
        label_continuations=2,
        label_completions=8,
        trainer_options={"train_dataset": prompt_dataset(64)},
        **options,
    )
    for owner, name, stage in (
        (trainer, "_generate_and_score_completions", "sampling"),
        (trainer, "training_step", "policy step"),
        (trainer, "_label_by_sampling", "labelling"),
        (trainer.reward_update, "train", "reward update"),
        (trainer, "_save_checkpoint", "saving"),
    ):
        setattr(owner, name, announced(getattr(owner, name), stage, pipe))
    trainer.train(resume_from_checkpoint=True if last_complete_checkpoint(folder / "output") else None)
    trainer.save_model()


def fork(folder: Path, log: Path) -> tuple[int, int]:
    """A process that runs the training; its id, and the end of the pipe to read from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        try:
            run(folder, writing)
        except BaseException:  # forked: nothing but its exit code may come of it
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    return child, reading


def finish(folder: Path, log: Path) -> None:
    child, pipe = fork(folder, log)
    while os.read(pipe, 4096):
        pass
    os.close(pipe)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, log.read_text()[-3000:]


def kill_at(folder: Path, log: Path, stage: str, occurrence: int, delay: float) -> None:
    """Kill the run some moments after a stage has begun for the n-th time."""
    child, pipe = fork(folder, log)
    seen = ""
    while seen.count(f"{stage}\n") < occurrence:
        told = os.read(pipe, 1)
        assert told, f"{stage} begins less than {occurrence} times: {log.read_text()[-3000:]}"
        seen += told.decode()
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(pipe)


def stored(folder: Path) -> dict[str, list[dict]]:
    return {
        file.name: pyarrow.parquet.read_table(file, use_threads=False).to_pylist()
        for file in sorted((folder / "rollouts").glob("*.parquet"))
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    output = folder / "output"
    return {
        **load_file(output / "model.safetensors"),
        **{f"reward {name}": value for name, value in load_file(output / "reward_model/model.safetensors").items()},
    }


def main(folder: Path, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    finish(folder / "whole", folder / "whole.log")
    expected_weights, expected_rollouts = weights(folder / "whole"), stored(folder / "whole")
    report = []
    for kill in range(num_kills):
        stage = STAGES[kill % len(STAGES)]
        killed, log = folder / f"killed-{kill}", folder / f"killed-{kill}.log"
        occurrence = rng.randint(1, 3 if stage in ("labelling", "reward update") else 6)
        kill_at(killed, log, stage, occurrence, delay=rng.uniform(0, 0.06))
        checkpoint = last_complete_checkpoint(killed / "output")
        step = int(checkpoint.split("-")[-1]) if checkpoint else 0
        before = {name: rows for name, rows in stored(killed).items() if int(name.split("-")[1]) < step}
        finish(killed, log)
        after = stored(killed)
        for name, rows in before.items():
            for row, kept in zip(rows, after[name], strict=True):
                assert row["completion_ids"] == kept["completion_ids"]
                assert not row["step_labels"] or row["step_labels"] == kept["step_labels"]
        assert after == expected_rollouts
        ended = weights(killed)
        assert ended.keys() == expected_weights.keys()
        assert all(torch.equal(ended[name], value) for name, value in expected_weights.items())
        report.append({"stage": stage, "occurrence": occurrence, "resumed_from_step": step, "kept_files": len(before)})
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
