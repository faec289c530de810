"""Files that a kill leaves whole, and jobs that go on from those they had written."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end becomes the file. A kill meanwhile leaves what the file was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    yield unfinished
    unfinished.replace(file)


class PartStore:
    """
    The rows that a job makes, on disk as parquet, in parts that are written whole or not at all.

    Args:
        folder (`str` or `Path`):
            Where the parts lie. `datasets.load_dataset(folder)` reads them.
        settings (`dict`):
            What the rows are made with. A folder made with other settings is refused.
        split (`str`, *optional*, defaults to `"train"`):
            Split as which they are read.

    Raises:
        `ValueError`: if the folder holds rows made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any], split: str = "train"):
        self.folder = Path(folder)
        self.settings = settings
        self.split = split
        file = self.folder / "settings.json"
        if file.exists() and read_json(file) != settings:
            raise ValueError(
                f"`output_dir` is '{folder}', which holds what was made with other settings ({file}); name another "
                "folder."
            )

    def has(self, part: int) -> bool:
        """Whether a part is finished."""
        return self._file(part).exists()

    def write(self, part: int, rows: list[dict[str, Any]]) -> None:
        """Write a part; a kill meanwhile leaves none."""
        with written_whole(self.folder / "settings.json") as unfinished:
            unfinished.write_text(json.dumps(self.settings, indent=2) + "\n")
        with written_whole(self._file(part)) as unfinished:
            Dataset.from_list(rows).to_parquet(unfinished)

    def load(self) -> Dataset:
        """All finished parts."""
        return Dataset.from_parquet([str(file) for file in sorted(self.folder.glob("*.parquet"))])

    def _file(self, part: int) -> Path:
        return self.folder / f"{self.split}-{part:05d}.parquet"


def read_json(file: Path) -> Any:
    """What a JSON file holds, `None` if it cannot be read."""
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError:
        return None
