import pytest
from datasets import load_dataset

from trl_grpo_ext.files import PartStore


class TestPartStore:
    ROWS = [{"prompt": "a", "completions": ["b", "c"], "labels": [1.0, None], "solution": "1"}]

    def test_is_read_by_datasets_and_skips_what_is_unfinished(self, tmp_path):
        store = PartStore(tmp_path / "labels", {"mode": "soft"})
        store.write(0, self.ROWS)
        store.write(2, self.ROWS)
        (tmp_path / "labels" / "train-00001.unfinished").write_bytes(b"half a file")
        assert [store.has(part) for part in range(3)] == [True, False, True]
        assert load_dataset(str(tmp_path / "labels"), split="train").to_list() == self.ROWS * 2
        assert store.load().to_list() == self.ROWS * 2

    def test_other_settings_are_refused(self, tmp_path):
        PartStore(tmp_path / "l", {"mode": "hard"})  # nothing was made yet
        PartStore(tmp_path, {"mode": "soft"}).write(0, self.ROWS)
        PartStore(tmp_path, {"mode": "soft"})
        with pytest.raises(ValueError, match="which holds what was made with other settings"):
            PartStore(tmp_path, {"mode": "hard"})
