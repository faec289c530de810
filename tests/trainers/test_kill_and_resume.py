import subprocess
import sys
from pathlib import Path

from .kill_and_resume import STAGES


def test_a_run_killed_in_any_stage_ends_as_if_it_had_not_been(tmp_path):
    """One kill a stage; `python -m tests.trainers.kill_and_resume FOLDER 20 SEED` does as many as one likes."""
    subprocess.run(
        [sys.executable, "-m", "tests.trainers.kill_and_resume", str(tmp_path), str(len(STAGES)), "0"],
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=300,
    )
    assert (tmp_path / "report.json").exists()
