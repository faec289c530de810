import json

import pytest
from datasets import Dataset

from trl_grpo_ext.data import check_reward_columns, get_split, load_prompt_dataset, to_prompts_and_solutions


@pytest.fixture
def gsm8k_file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n")
    return path


def test_a_local_file_becomes_conversational_prompts(gsm8k_file):
    dataset = to_prompts_and_solutions(load_prompt_dataset(str(gsm8k_file))["train"], instruction="Think.")
    assert dataset.to_list() == [
        {"prompt": [{"role": "user", "content": "What is 1 + 1?\nThink."}], "solution": "1 + 1 = 2\n#### 2"}
    ]


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_other_formats_load_alike(tmp_path, gsm8k_file, suffix):
    rows = load_prompt_dataset(str(gsm8k_file))["train"]
    path = tmp_path / f"other.{suffix}"
    getattr(rows, f"to_{suffix}")(path)
    assert load_prompt_dataset(str(path))["train"].to_list() == rows.to_list()


def test_a_folder_keeps_its_splits(tmp_path, gsm8k_file):
    (tmp_path / "test.jsonl").write_text(gsm8k_file.read_text() * 2)
    dataset = load_prompt_dataset(str(tmp_path))
    assert {name: len(split) for name, split in dataset.items()} == {"train": 1, "test": 2}


def test_conversational_prompts_and_other_columns_are_kept():
    prompt = [{"role": "user", "content": "Hi"}]
    dataset = Dataset.from_list([{"prompt": prompt, "answer": "1", "level": 3}])
    assert to_prompts_and_solutions(dataset).to_list() == [{"prompt": prompt, "solution": "1", "level": 3}]


def test_numbers_as_answers_become_text():
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "Hi"}], "solution": 38}])
    assert to_prompts_and_solutions(dataset)[0]["solution"] == "38"


def test_rows_without_answer_are_counted_and_refused():
    dataset = Dataset.from_dict({"question": ["a", "b", "c"], "answer": ["1", None, None]})
    with pytest.raises(ValueError, match="The data set has no 'answer' in 2 of 3 rows, first in row 1"):
        to_prompts_and_solutions(dataset)


@pytest.mark.parametrize("content", ["", "{broken"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"`dataset_name` is '.*broken.jsonl', which is empty or cannot be read"):
        load_prompt_dataset(str(path))


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="The data set is empty"):
        to_prompts_and_solutions(Dataset.from_dict({"prompt": [], "solution": []}))


@pytest.mark.parametrize(
    ("columns", "needed"),
    [({"text": ["a"], "answer": ["1"]}, "'prompt' or 'question'"), ({"question": ["a"]}, "'solution' or 'answer'")],
)
def test_missing_columns_are_refused(columns, needed):
    with pytest.raises(ValueError, match=f"The data set has the columns .*, but needs one named {needed}"):
        to_prompts_and_solutions(Dataset.from_dict(columns))


def test_a_missing_file_or_split_is_refused(tmp_path, gsm8k_file):
    with pytest.raises(ValueError, match=r"`dataset_name` is '.*nope.jsonl', but there is no such file"):
        load_prompt_dataset(str(tmp_path / "nope.jsonl"))
    with pytest.raises(ValueError, match=r"`dataset_name` is '.*nope', which is neither a file or folder here"):
        load_prompt_dataset(str(tmp_path / "nope"))
    with pytest.raises(
        ValueError, match="`dataset_test_split` is 'test', but the data set has only the splits train; name one"
    ):
        get_split(load_prompt_dataset(str(gsm8k_file)), "test", "dataset_test_split")


def test_columns_that_reward_functions_need():
    def needs(prompts, steps, equations, log_metric, strict=True, **kwargs):
        return []

    check_reward_columns(Dataset.from_dict({"equations": [["1"]]}), [needs])
    with pytest.raises(
        ValueError, match="The reward function 'needs' needs a column 'equations', but the data set has"
    ):
        check_reward_columns(Dataset.from_dict({"prompt": ["1"]}), [needs])
