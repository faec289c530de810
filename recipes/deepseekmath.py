# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext[plots]"]
# ///
"""The main job; `--help` lists its arguments. The code is in trl_grpo_ext/scripts/deepseekmath.py."""

from trl_grpo_ext.scripts.deepseekmath import run


if __name__ == "__main__":
    run()
