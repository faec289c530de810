# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext[plots]"]
# ///
"""Compares finished runs; `--help` lists its arguments. The code is in trl_grpo_ext/scripts/compare_runs.py."""

from trl_grpo_ext.scripts.compare_runs import run


if __name__ == "__main__":
    run()
