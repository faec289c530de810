"""Pushes to the Hub: no token is among what is uploaded, and a failed one says how to go on."""

import shlex
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


class KeepsToken:
    """
    A configuration that is pickled, and copied, without its `hub_token`.

    `training_args.bin`, which is pushed with the model, is a pickle.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hub_token": None}


class PushesSafely(Trainer):
    """A trainer whose failed push says where the model is, and how to push it from there."""

    def save_locally(self) -> None:
        """Save the model in the output folder, and push nothing yet."""
        self.save_model(self.args.output_dir, _internal_call=True)

    def push_to_hub(self, *args, **kwargs) -> Any:
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:  # each way to upload has its own
            folder, repo_id = self.args.output_dir, self.hub_model_id
            raise RuntimeError(
                f"The push to '{repo_id}' failed ({str(error).partition(chr(10))[0]}), but what was saved is in "
                f"'{folder}'; push it with `{upload_command(repo_id, folder, bool(self.args.hub_private_repo))}`."
            ) from error


def upload_command(repo_id: str | None, folder: str, private: bool) -> str:
    """What uploads an output folder as a trainer does."""
    words = ["hf", "upload", repo_id or "REPOSITORY", folder, ".", *(["--private"] if private else [])]
    return shlex.join([*words, "--exclude", "_*", "--exclude", f"{PREFIX_CHECKPOINT_DIR}-*"])
