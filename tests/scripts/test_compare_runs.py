import json

import pytest

from trl_grpo_ext.scripts import compare_runs


def finished_run(folder, after, curve):
    state = {"log_history": [{"step": step, "eval_reward": value} for step, value in curve.items()]}
    (folder / "checkpoint-4").mkdir(parents=True)
    (folder / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
    results = {"before": {"greedy": 0.5, "num_problems": 8}, "after": {"greedy": after, "num_problems": 8}}
    (folder / "results.json").write_text(json.dumps(results))


def test_table_and_picture_of_two_groups(tmp_path, capsys):
    for name, after in (("a0", 0.6), ("a1", 0.7), ("b0", 0.9)):
        finished_run(tmp_path / name, after, {2: 0.4, 4: after})
    picture = tmp_path / "picture.png"
    compare_runs.run([f"ours={tmp_path}/a0,{tmp_path}/a1", f"theirs={tmp_path}/b0", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line for line in capsys.readouterr().out.splitlines() if "greedy" in line]
    assert ["50.0 → 60.0" in lines[0], "50.0 → 70.0" in lines[0], "65.0" in lines[0]] == [True] * 3
    assert "50.0 → 90.0" in lines[1]


def test_what_cannot_be_compared_is_named(tmp_path):
    finished_run(tmp_path / "a", 0.6, {2: 0.4})
    with pytest.raises(ValueError, match="must be label=folder"):
        compare_runs.run([str(tmp_path / "a")])
    with pytest.raises(ValueError, match="has no results"):
        compare_runs.run([f"ours={tmp_path}/nothing"])
    with pytest.raises(ValueError, match="`metric` is 'speed'"):
        compare_runs.run([f"ours={tmp_path}/a", "--metric", "speed", "--output", str(tmp_path / "p.png")])
