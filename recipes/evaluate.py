# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext[plots,math]"]
# ///
"""Evaluate as DeepSeekMath does; `--help` lists the arguments. The code is in trl_grpo_ext/scripts/evaluate.py."""

from trl_grpo_ext.scripts.evaluate import run


if __name__ == "__main__":
    run()
