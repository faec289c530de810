"""
Jobs that push to the server that the environment names: run by the test.

An iterative run and a process reward model, both of adapters, then two jobs whose upload fails.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch

from trl_grpo_ext.scripts import deepseekmath, train_prm

from ..tiny import tiny_tokenizer
from ..trainers.test_iterative_trainer import trainer_of_kind
from .test_deepseekmath import SMALL as SMALL_POLICY
from .test_train_prm import SMALL as SMALL_PRM


LORA = ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"]


def hub_options(name: str) -> dict:
    return {
        "push_to_hub": True,
        "hub_model_id": f"tester/{name}",
        "hub_token": "hf_none",
        "hub_private_repo": name != "prm",
    }


def arguments(name: str, folder: Path) -> list[str]:
    options = {**hub_options(name), "output_dir": folder / name}
    return [word for option, value in options.items() for word in (f"--{option}", str(value))]


def push_iterative(folder: Path) -> None:
    trainer = trainer_of_kind(
        "lora", folder / "iterative", tiny_tokenizer(), save_strategy="steps", save_steps=2, **hub_options("iterative")
    )
    trainer.train()
    trainer.push_to_hub()


def failing(folder: Path, name: str, run, *options: str) -> None:
    try:
        run([*options, *arguments(name, folder)])
    except RuntimeError as error:
        (folder / f"{name}.txt").write_text(str(error))


def main(folder: Path) -> None:
    push_iterative(folder)
    train_prm.run([*SMALL_PRM, *LORA, *arguments("prm", folder)])
    with patch("time.sleep"):  # between tries
        failing(folder, "broken", deepseekmath.run, *SMALL_POLICY, "--num_eval_problems", "0", "--save_strategy", "no")
        failing(folder, "gone", train_prm.run, *SMALL_PRM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
