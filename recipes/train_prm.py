# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext"]
# ///
"""Train a process reward model; `--help` lists its arguments. The code is in trl_grpo_ext/scripts/train_prm.py."""

from trl_grpo_ext.scripts.train_prm import run


if __name__ == "__main__":
    run()
