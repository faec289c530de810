"""Files that a kill leaves whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end becomes the file. A kill meanwhile leaves what the file was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    yield unfinished
    unfinished.replace(file)
