# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext"]
# ///
"""Label reasoning steps by sampling; `--help` lists its arguments. Code: trl_grpo_ext/scripts/label_steps.py."""

from trl_grpo_ext.scripts.label_steps import run


if __name__ == "__main__":
    run()
