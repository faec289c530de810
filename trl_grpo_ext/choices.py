"""The one sentence for a value that is not among those there are."""

from collections.abc import Iterable


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> ValueError:
    """The error to raise where the argument or field `name` has a value outside `choices`."""
    return ValueError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, choices))}.")
