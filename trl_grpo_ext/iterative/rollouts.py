"""What the policy sampled, on disk: the history that Algorithm 1's replay mechanism draws from."""

from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import pyarrow.parquet

from ..files import written_whole


@dataclass(frozen=True)
class Rollout:
    """
    One sampled completion and what is known of it.

    Args:
        prompt (`str` or `list` of messages):
            The question, plain or conversational.
        completion (`str`):
            Text of the completion.
        prompt_ids, completion_ids (`list[int]`):
            Ids of the prompt as the policy was asked, and of the completion as it was sampled.
        steps (`list[str]`):
            The completion cut into steps; empty where nothing scores steps.
        step_ends (`list[int]`):
            Index in `completion_ids` of the last token of each step.
        step_rewards (`list[float | None]`):
            Reward of each step.
        step_labels (`list[float | None]`):
            Label of each step, in 0 to 1; empty until it is labelled.
        reward (`float`, *optional*):
            Reward of the completion, `None` where no reward function scored.
        verified (`float`, *optional*):
            1 if the answer is right by rule, 0 if wrong, `None` if the rule cannot tell.
        solution (`str`, *optional*):
            The right answer, where the data set has one.
        iteration (`int`):
            Outer iteration in which it was sampled, from 0 on.
        policy_step (`int`):
            Optimizer steps that the sampling policy had taken.
    """

    prompt: str | list[dict[str, str]]
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    steps: list[str]
    step_ends: list[int]
    step_rewards: list[float | None]
    step_labels: list[float | None]
    reward: float | None
    verified: float | None
    solution: str | None
    iteration: int
    policy_step: int

    @property
    def completion_message(self) -> str | list[dict[str, str]]:
        """The completion in the form of its prompt, plain or conversational."""
        if isinstance(self.prompt, str):
            return self.completion
        return [{"role": "assistant", "content": self.completion}]


INTEGER, NUMBER, TEXT = pyarrow.int64(), pyarrow.float64(), pyarrow.string()
COLUMNS = {
    "completion": TEXT,
    "prompt_ids": pyarrow.list_(INTEGER),
    "completion_ids": pyarrow.list_(INTEGER),
    "steps": pyarrow.list_(TEXT),
    "step_ends": pyarrow.list_(INTEGER),
    "step_rewards": pyarrow.list_(NUMBER),
    "step_labels": pyarrow.list_(NUMBER),
    "reward": NUMBER,
    "verified": NUMBER,
    "solution": TEXT,
    "iteration": INTEGER,
    "policy_step": INTEGER,
}
MESSAGES = pyarrow.list_(pyarrow.struct({"role": TEXT, "content": TEXT}))


class RolloutStore:
    """
    Rollouts as parquet files, one for each generation batch, each written whole or not at all.

    `datasets.load_dataset(folder)` reads them.

    Args:
        folder (`str` or `Path`):
            Where the files lie.
        capacity (`int`):
            Number of rollouts that are kept, the newest ones.
    """

    def __init__(self, folder: str | Path, capacity: int):
        self.folder = Path(folder)
        self.capacity = capacity

    def add(self, rollouts: list[Rollout], policy_step: int) -> None:
        """Write the rollouts of one generation batch."""
        part = sum(1 for _ in self.folder.glob(f"step-{policy_step:07d}-*.parquet"))
        self.write(self.folder / f"step-{policy_step:07d}-{part:03d}.parquet", rollouts)

    def write(self, file: Path, rollouts: list[Rollout]) -> None:
        """Write a file of rollouts, or write it anew; a kill meanwhile leaves what was there."""
        table = pyarrow.Table.from_pylist([asdict(rollout) for rollout in rollouts], schema=schema_of(rollouts))
        with written_whole(file) as unfinished:
            pyarrow.parquet.write_table(table, unfinished)

    def read(self, file: Path) -> list[Rollout]:
        """The rollouts of a file."""
        return [Rollout(**row) for row in pyarrow.parquet.read_table(file).to_pylist()]

    def load(self) -> list[Rollout]:
        """The newest `capacity` rollouts, oldest first."""
        batches: list[list[Rollout]] = []
        for file in reversed(self.files()):
            if sum(map(len, batches)) >= self.capacity:
                break
            batches.append(self.read(file))
        return [rollout for batch in reversed(batches) for rollout in batch][-self.capacity :]

    def drop_from(self, policy_step: int) -> None:
        """Delete what was sampled from an optimizer step on: a resumed run samples it again."""
        for file in self.files(since=policy_step):
            file.unlink()

    def prune(self) -> None:
        """Delete the files that hold nothing of the newest `capacity` rollouts."""
        num_kept = 0
        for file in reversed(self.files()):
            if num_kept >= self.capacity:
                file.unlink()
            else:
                num_kept += pyarrow.parquet.read_metadata(file).num_rows

    def set_aside(self) -> Path | None:
        """Rename the folder if it holds rollouts of another run; what it is called then."""
        if not self.files():
            return None
        number = next(n for n in count(1) if not self.folder.with_name(f"{self.folder.name}-{n}").exists())
        return self.folder.rename(self.folder.with_name(f"{self.folder.name}-{number}"))

    def files(self, since: int = 0) -> list[Path]:
        """The files, oldest first, of what was sampled from an optimizer step on."""
        return sorted(file for file in self.folder.glob("step-*.parquet") if step_of(file) >= since)


def schema_of(rollouts: list[Rollout]) -> pyarrow.Schema:
    """Column types, the same in every file whatever is missing in it."""
    return pyarrow.schema({"prompt": TEXT if isinstance(rollouts[0].prompt, str) else MESSAGES, **COLUMNS})


def step_of(file: Path) -> int:
    return int(file.stem.split("-")[1])
