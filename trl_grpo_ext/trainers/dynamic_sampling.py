"""Dynamic sampling (DAPO, arXiv:2503.14476, 3.2): a batch without groups that teach nothing."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from datasets import Dataset

from ..files import written_whole
from .generation_batch import PromptStream, Window, is_live, join_groups, split_groups
from .grpo_config import GRPOExtConfig
from .loss_options import LossOptions, own_tokens


logger = logging.getLogger(__name__)

STATE_FOLDER = "dynamic_sampling"
Group = dict[str, torch.Tensor]  # of G rows


class DynamicSampling(LossOptions):
    """
    Groups whose advantages are all 0 are replaced by groups of other prompts, for a bounded number of rounds.

    Each process replaces its own groups, and all sample as many in a round, by what the one needs that lacks most.
    What is left over waits for the next batch, with the log probabilities that it was sampled with.
    """

    args: GRPOExtConfig
    is_dynamic = False
    _surplus: list[Group] = []
    _says_when_bounded = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_dynamic = getattr(self.args, "dynamic_sampling", False)
        if not self.is_dynamic:
            return
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"`dynamic_sampling` is True, but `train_dataset` is a {type(self.train_dataset).__name__}, of which "
                "no further prompts can be drawn; pass a `Dataset`."
            )
        if images := {"image", "images"} & set(self.train_dataset.column_names):
            raise ValueError(
                f"`dynamic_sampling` is True, but the data set has a column {images.pop()!r}, and only text "
                "can be refilled; leave it out."
            )
        self._prompts = PromptStream(len(self.train_dataset), self.args.seed)

    def sample_batch(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().sample_batch(inputs)
        if not self.is_dynamic or self.mode == "eval":
            return batch
        if self._total(len(self._surplus)):
            batch = self._with_sampling_logps(batch)
        window = Window(split_groups(batch, self.num_generations))
        num_empty = len(window.empty)
        rounds, spare = self._refill(window)
        # Another process may lack groups for long while this one has them to spare
        self._surplus = spare[-len(window.groups) :]
        counts = {
            "refilled": num_empty - len(window.empty),
            "left": len(window.empty),
            "kept": len(self._surplus),
            "dropped": len(spare) - len(self._surplus),
        }
        self._log_rounds(rounds, counts)
        return self._joined(window.groups, batch)

    def _refill(self, window: Window) -> tuple[int, list[Group]]:
        """Fill the empty places of all processes, if that can be; returns the rounds it took and what is left over."""
        size = len(window.groups)
        num_live, num_sampled = self._total(size - len(window.empty)), self._total(size)
        spare = window.fill(self._surplus)
        rounds = 0
        while (missing := self._largest(len(window.empty))) and rounds < self.args.dynamic_sampling_max_rounds:
            rounds += 1
            # As many as will do if the share of live ones stays what it was
            number = min(size, math.ceil(missing * num_sampled / num_live)) if num_live else size
            sampled = self._with_sampling_logps(super().sample_batch(self._new_inputs(number)))
            live = [group for group in split_groups(sampled, self.num_generations) if is_live(group)]
            spare = window.fill([*spare, *live])
            num_live, num_sampled = num_live + self._total(len(live)), num_sampled + self._total(number)
        return rounds, spare

    def drop_buffered_completions(self) -> None:
        super().drop_buffered_completions()
        self._surplus = []

    def save_checkpoint_state(self, checkpoint: Path) -> None:
        super().save_checkpoint_state(checkpoint)
        if not self.is_dynamic:
            return
        folder = checkpoint / STATE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{place}.{key}": value.contiguous()
            for place, group in enumerate(self._surplus)
            for key, value in group.items()
        }
        safetensors.torch.save_file(tensors, self._surplus_file(folder))
        if self.args.should_save:
            with written_whole(folder / "state.json") as unfinished:
                unfinished.write_text(json.dumps({"prompts_taken": self._prompts.position}))

    def load_checkpoint_state(self, checkpoint: Path) -> None:
        super().load_checkpoint_state(checkpoint)
        folder = checkpoint / STATE_FOLDER
        if not self.is_dynamic or not folder.exists():
            return
        self._prompts.position = json.loads((folder / "state.json").read_text())["prompts_taken"]
        file = self._surplus_file(folder)
        if file.exists():  # a run of more processes has more of them
            # On the CPU at first: safetensors does not know the `cpu:0` that several processes on CPUs have
            tensors = safetensors.torch.load_file(file)
            self._surplus = ungrouped({key: value.to(self.accelerator.device) for key, value in tensors.items()})

    def _surplus_file(self, folder: Path) -> Path:
        return folder / f"surplus-{self.accelerator.process_index:03d}.safetensors"

    def _new_inputs(self, num_groups: int) -> list[dict[str, Any]]:
        """Rows of further prompts, `num_groups` of them on each process, once for each completion."""
        rows = self._prompts.take(num_groups * self.accelerator.num_processes)[self.local_rows(num_groups)]
        return [self.train_dataset[row] for row in rows for _ in range(self.num_generations)]

    def _with_sampling_logps(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the log probabilities that it was sampled with, which TRL leaves out where none are older."""
        if batch.get("old_per_token_logps") is not None:
            return batch
        return {**batch, "old_per_token_logps": self.completion_logps(batch)}

    def _joined(self, groups: list[Group], batch: dict[str, Any]) -> dict[str, Any]:
        """The groups as a generation batch like one of TRL's."""
        if "old_per_token_logps" not in batch:  # all were sampled by the policy as it is
            groups = [{key: value for key, value in group.items() if key != "old_per_token_logps"} for group in groups]
        joined = {**batch, **join_groups(groups, self.text_tokenizer.pad_token_id)}
        num_items = torch.full_like(batch["num_items_in_batch"], self._total(int(own_tokens(joined).sum())))
        return {**joined, "num_items_in_batch": num_items}

    def _over_processes(self, number: int) -> torch.Tensor:
        """A number of each process."""
        return self.accelerator.gather(torch.tensor([number], device=self.accelerator.device))

    def _total(self, number: int) -> int:
        return int(self._over_processes(number).sum())

    def _largest(self, number: int) -> int:
        return int(self._over_processes(number).max())

    def _log_rounds(self, rounds: int, counts: dict[str, int]) -> None:
        totals = {name: self._total(value) for name, value in counts.items()}
        self.log_metric("dynamic_sampling/rounds", rounds)
        for name, total in totals.items():
            self.log_metric(f"dynamic_sampling/{name}", total)
        if totals["left"] and self._says_when_bounded and self.accelerator.is_main_process:
            logger.warning(
                "After %d rounds of dynamic sampling %d groups still have equal rewards and are trained on as they "
                "are; raise `dynamic_sampling_max_rounds`, or take prompts that are neither too easy nor too hard. "
                "(Said once; see the metric dynamic_sampling/left.)",
                rounds,
                totals["left"],
            )
            self._says_when_bounded = False


def ungrouped(tensors: dict[str, torch.Tensor]) -> list[Group]:
    """Groups from tensors named by the place of their group and their key."""
    groups: dict[int, Group] = {}
    for name, tensor in tensors.items():
        place, key = name.split(".", 1)
        groups.setdefault(int(place), {})[key] = tensor
    return [groups[place] for place in sorted(groups)]
