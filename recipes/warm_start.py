# /// script
# requires-python = ">=3.11"
# dependencies = ["trl_grpo_ext"]
# ///
"""Makes the embedded policy again. The code is in trl_grpo_ext/scripts/warm_start.py."""

from trl_grpo_ext.scripts.warm_start import run


if __name__ == "__main__":
    run()
