import json

import pytest
from datasets import Dataset

from trl_grpo_ext import ProcessRewardModel
from trl_grpo_ext.scripts import train_prm


SMALL = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--num_train_problems", "60"]


def test_trains_saves_and_reports(tmp_path):
    train_prm.run([*SMALL, "--output_dir", str(tmp_path / "prm")])
    results = json.loads((tmp_path / "prm" / "results.json").read_text())
    assert results["before"]["eval_loss"] != results["after"]["eval_loss"]
    assert len(ProcessRewardModel(str(tmp_path / "prm")).score(["How many?"], [["1 + 1 = 2", "2"]])[0]) == 2


def test_held_out_rows_share_no_question_with_the_training(tmp_path):
    rows = [{"prompt": f"q{i // 3}", "completions": ["a", "b"], "labels": [1.0, 0.5]} for i in range(60)]
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train.parquet")
    train, held_out = train_prm.load_splits(
        train_prm.TrainPRMArguments(dataset_name=str(tmp_path / "data"), eval_share=0.2), seed=0
    )
    assert (len(train), len(held_out)) == (48, 12)
    assert not set(train["prompt"]) & set(held_out["prompt"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"eval_share": 1.0}, "`eval_share` is 1.0, but"), ({"num_train_problems": 0}, "`num_train_problems` is 0, but")],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        train_prm.TrainPRMArguments(**options)
