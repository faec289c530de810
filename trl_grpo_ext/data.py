"""Prompt/answer data sets for the recipes, from the Hub or local files, and the checks that spare a wasted run."""

import inspect
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from trl.trainer.utils import get_callable_name


PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("solution", "answer")
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# What TRL passes to every reward function besides the columns of the data set.
PROVIDED_ARGUMENTS = {"prompts", "completions", "completion_ids", "steps", "trainer_state", "log_extra", "log_metric"}


def load_prompt_dataset(name: str, config: str | None = None) -> DatasetDict:
    """
    Load a data set by its Hub id, or from a local folder or file (JSONL, JSON, parquet or CSV).

    Args:
        name (`str`):
            Hub id or path.
        config (`str`, *optional*):
            Configuration of a Hub data set.

    Raises:
        `ValueError`: if there is no such data set, or it cannot be read.
    """
    path = Path(name)
    if path.suffix in FILE_BUILDERS:
        if not path.is_file():
            raise ValueError(f"`dataset_name` is {name!r}, but there is no such file; check the path.")
        try:
            return load_dataset(FILE_BUILDERS[path.suffix], data_files=str(path))
        except (DatasetGenerationError, StopIteration) as error:
            raise ValueError(
                f"`dataset_name` is {name!r}, which is empty or cannot be read as {path.suffix} "
                f"({error.__cause__ or 'no rows'})."
            ) from error
    try:
        return load_dataset(name, config)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"`dataset_name` is {name!r}, which is neither a file or folder here nor a data set that can be reached "
            f"on the Hub ({str(error).splitlines()[0]})."
        ) from error


def get_split(dataset: DatasetDict, split: str, field: str) -> Dataset:
    """The split that the argument `field` names."""
    if split not in dataset:
        way_out = ", or set `num_eval_problems=0` to evaluate on none" if field == "dataset_test_split" else ""
        raise ValueError(
            f"`{field}` is {split!r}, but the data set has only the splits {', '.join(dataset)}; name one of "
            f"them{way_out}."
        )
    return dataset[split]


def to_prompts_and_solutions(dataset: Dataset, instruction: str | None = None) -> Dataset:
    """
    Give a data set the columns `prompt` (conversational) and `solution`.

    Args:
        dataset ([`~datasets.Dataset`]):
            Has a column `prompt`, `question` or `problem`, and a column `solution` or `answer`. A prompt that is a
            conversation already is left as it is. Other columns are kept.
        instruction (`str`, *optional*):
            Text to put after each question, on a line of its own.

    Raises:
        `ValueError`: if the data set is empty, lacks such a column, or has rows without prompt or answer.
    """
    if len(dataset) == 0:
        raise ValueError("The data set is empty; check `dataset_name` and the name of its split.")
    prompt_column = find_column(dataset, PROMPT_COLUMNS)
    answer_column = find_column(dataset, ANSWER_COLUMNS)
    for column in (prompt_column, answer_column):
        missing = [index for index, value in enumerate(dataset[column]) if value is None]
        if missing:
            raise ValueError(
                f"The data set has no {column!r} in {len(missing)} of {len(dataset)} rows, first in row {missing[0]}; "
                "fill them or leave the rows out."
            )

    dataset = dataset.cast_column(answer_column, Value("string"))  # `map` keeps the type of a column it writes again

    def convert(row: dict) -> dict:
        prompt = row[prompt_column]
        if isinstance(prompt, str):
            question = prompt if instruction is None else f"{prompt}\n{instruction}"
            prompt = [{"role": "user", "content": question}]
        return {"prompt": prompt, "solution": row[answer_column]}

    return dataset.map(convert, remove_columns=[prompt_column, answer_column])


def find_column(dataset: Dataset, candidates: tuple[str, ...]) -> str:
    for column in candidates:
        if column in dataset.column_names:
            return column
    raise ValueError(
        f"The data set has the columns {', '.join(dataset.column_names)}, but needs one named "
        f"{' or '.join(map(repr, candidates))}; rename it."
    )


def check_reward_columns(dataset: Dataset, funcs: list[Callable]) -> None:
    """
    Check that a data set has the columns that reward functions ask for by name.

    Raises:
        `ValueError`: if one is missing.
    """
    available = PROVIDED_ARGUMENTS | set(dataset.column_names)
    for func in funcs:
        for parameter in inspect.signature(func).parameters.values():
            is_required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if is_required and parameter.name not in available:
                raise ValueError(
                    f"The reward function '{get_callable_name(func)}' needs a column {parameter.name!r}, but the data "
                    f"set has only {', '.join(dataset.column_names)}; add the column or choose another function."
                )
