import json

import pytest
from datasets import Dataset

from trl_grpo_ext.data import (
    check_reward_columns,
    get_split,
    load_prompt_dataset,
    to_prompts_and_solutions,
    warn_of_unparsed_solutions,
    without_problems_of,
)
from trl_grpo_ext.rewards import answer_reward


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
    [
        ({"text": ["a"], "answer": ["1"]}, "'prompt' or 'question'"),
        ({"question": ["a"]}, "'solution' or 'answer_number'"),
    ],
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


SCHEMAS = {
    "gsm8k": ({"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, "so 5"),
    "math": (
        {"problem": "p", "level": "Level 1", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."},
        r"$\boxed{0.5}$",
    ),
    "math500": ({"problem": "p", "solution": r"\boxed{x+1}", "answer": "x+1", "subject": "Algebra"}, r"\boxed{1+x}"),
    "mgsm_zh": ({"question": "q", "answer": None, "answer_number": 18, "equation_solution": None}, "答案是十八。"),
    "cmath": ({"grade": 3, "question": "q", "golden": "1200", "reasoning_step": 2, "num_digits": 3}, "一共1,200元。"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_rows_of_each_benchmark_become_prompts_and_solutions_that_can_be_checked(tmp_path, name):
    row, completion = SCHEMAS[name]
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    dataset = to_prompts_and_solutions(load_prompt_dataset(str(path))["train"])
    assert dataset["prompt"][0] == [{"role": "user", "content": row.get("question", "p")}]
    assert answer_reward([completion, "14"], [dataset["solution"][0]] * 2) == [1.0, 0.0]


def problems(*questions):
    return to_prompts_and_solutions(Dataset.from_dict({"question": questions, "answer": ["1"] * len(questions)}))


def test_what_is_evaluated_on_is_not_trained_on(caplog):
    kept = without_problems_of(problems("a  b\n", "c", "d"), problems("a b", "e"), "test")
    assert [prompt[0]["content"] for prompt in kept["prompt"]] == ["c", "d"]
    assert "1 of 3 training problems are also in the split 'test'" in caplog.text
    with pytest.raises(ValueError, match="All 1 training problems are in the split 'test'"):
        without_problems_of(problems("a b"), problems("a b", "e"), "test")


def test_problems_without_a_gold_answer_are_counted_and_named(caplog):
    solutions = ["#### 5", "####", "a proof " * 60, r"\boxed{", "x"] + [""] * 10
    dataset = to_prompts_and_solutions(Dataset.from_dict({"question": ["q"] * 15, "answer": solutions}))
    warn_of_unparsed_solutions(dataset, "train")
    assert "The solutions of 13 of 15 problems of the split 'train'" in caplog.text
    assert "rows 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, ..." in caplog.text
    assert answer_reward(["1"] * 15, solutions)[1:4] == [None] * 3


def test_columns_that_reward_functions_need():
    def needs(prompts, steps, equations, log_metric, strict=True, **kwargs):
        return []

    check_reward_columns(Dataset.from_dict({"equations": [["1"]]}), [needs])
    with pytest.raises(
        ValueError, match="The reward function 'needs' needs a column 'equations', but the data set has"
    ):
        check_reward_columns(Dataset.from_dict({"prompt": ["1"]}), [needs])
