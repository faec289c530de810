# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext"]
# ///
"""Makes the embedded judge again. The code is in trl_grpo_ext/scripts/warm_start_judge.py."""

from trl_grpo_ext.scripts.warm_start_judge import run


if __name__ == "__main__":
    run()
