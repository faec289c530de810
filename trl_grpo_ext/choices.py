"""The one sentence for a value that is not among those there are, or too small."""

from collections.abc import Iterable


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> ValueError:
    """The error to raise where the argument or field `name` has a value outside `choices`."""
    return ValueError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, choices))}.")


def check_at_least_one(**values: int | None) -> None:
    """Raise a `ValueError` that names the first value below 1; `None` is none."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}, but must be 1 or more.")
