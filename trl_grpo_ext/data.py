"""Prompt/answer data sets for the recipes, from the Hub or local files, and the checks that spare a wasted run."""

import inspect
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from trl.trainer.utils import get_callable_name

from .rewards.answer import can_be_checked


logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "question", "problem")
# In GSM8K and MATH the answer ends the solution; MGSM has it as `answer_number`, CMATH as `golden`
ANSWER_COLUMNS = ("solution", "answer_number", "golden", "answer")
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
NAMED_ROWS = 10  # of those that a warning is about
# What TRL passes to every reward function besides the columns of the data set.
PROVIDED_ARGUMENTS = {
    "prompts",
    "completions",
    "completion_ids",
    "steps",
    "step_ends",
    "trainer_state",
    "log_extra",
    "log_metric",
}


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
            Has a column `prompt`, `question` or `problem`, and a column `solution`, `answer_number` (MGSM), `golden`
            (CMATH) or `answer`, the first of these that is there. A prompt that is a conversation already is left as
            it is. Other columns are kept.
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


def without_problems_of(dataset: Dataset, other: Dataset, split: str) -> Dataset:
    """
    The problems of a data set that are not in another one, which is not to be trained on.

    Args:
        dataset, other ([`~datasets.Dataset`]):
            Data sets with a column `prompt`.
        split (`str`):
            Name of the other one. What is left out is counted in a warning.

    Raises:
        `ValueError`: if no problem is left.
    """
    held_out = {problem_key(prompt) for prompt in other["prompt"]}
    kept = [row for row, prompt in enumerate(dataset["prompt"]) if problem_key(prompt) not in held_out]
    left_out = len(dataset) - len(kept)
    if not kept:
        raise ValueError(
            f"All {len(dataset)} training problems are in the split {split!r} that is evaluated on; name another "
            "`dataset_train_split` or `dataset_test_split`."
        )
    if left_out:
        logger.warning(
            "%d of %d training problems are also in the split %r; they are not trained on.",
            left_out,
            len(dataset),
            split,
        )
    return dataset.select(kept) if left_out else dataset


def problem_key(prompt: str | list[dict]) -> str:
    """What two prompts of the same problem have in common, whatever their spaces."""
    return re.sub(r"\\n|\s", "", json.dumps(prompt, ensure_ascii=False, sort_keys=True))


def warn_of_unparsed_solutions(dataset: Dataset, split: str) -> None:
    """Count and name the problems whose `solution` has no answer that a completion's could be compared with."""
    unparsed = [row for row, solution in enumerate(dataset["solution"]) if not can_be_checked(solution)]
    if unparsed:
        logger.warning(
            "The solutions of %d of %d problems of the split %r have no answer that can be checked, so that "
            "`answer_reward` has no reward for them: rows %s.",
            len(unparsed),
            len(dataset),
            split,
            ", ".join(map(str, unparsed[:NAMED_ROWS])) + (", ..." if len(unparsed) > NAMED_ROWS else ""),
        )


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
