# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext[plots]"]
# ///
"""Algorithm 1, iterative GRPO; `--help` lists its arguments. The code is in trl_grpo_ext/scripts/iterative_grpo.py."""

from trl_grpo_ext.scripts.iterative_grpo import run


if __name__ == "__main__":
    run()
