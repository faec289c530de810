import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..batching import in_eval_mode, pad_right
from ..choices import unknown_choice
from ..rewards.answer import completion_text
from ..scorer import Scorer, loaded_whole, no_such_model
from ..shared_prefix import (
    COARSE_ROUNDING,
    ROUNDING,
    cache_argument,
    cache_of_rows,
    computes_coarsely,
    number_prompts,
    prefix_batches,
)
from ..steps import SeparatorSplitter, TextSplitter
from .formats import FORMATS, EncodedSteps, PRMFormat, TokenClassificationFormat, backbone_of, detect_format


logger = logging.getLogger(__name__)

SETTINGS_FILE = "process_reward_model.json"
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda scores: scores[-1],
    "min": torch.min,
    "mean": torch.mean,
    "product": torch.prod,
}


class ProcessRewardModel(Scorer):
    r"""
    A process reward model (PRM) checkpoint as a reward function.

    It scores every step of a completion in one forward pass, in eval mode and without gradients. What completions of a
    batch have in common at their start, as a prompt, is computed once where that is less work and the model can do it,
    which is tried on two completions at first. Given to [`GRPOExtTrainer`] as one of its `step_reward_funcs` it
    returns a score a step ([`score_steps`]); as one of the `reward_funcs` of any TRL trainer it returns one number a
    completion.

    Example:

    ```python
    prm = ProcessRewardModel("Qwen/Qwen2.5-Math-PRM-7B", model_init_kwargs={"dtype": "bfloat16", "device_map": "auto"})
    trainer = GRPOExtTrainer(..., args=GRPOExtConfig(supervision="process"), step_reward_funcs=prm)
    trainer = trl.GRPOTrainer(..., reward_funcs=prm)  # the last step's score
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            A Hub id, a folder (also one that [`PRMTrainer`] saved), or a loaded model, with or without adapters.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The PRM's own tokenizer, which need not be the policy's. By default loaded from `model`.
        prm_format (`str` or [`~trl_grpo_ext.prm.formats.PRMFormat`], *optional*):
            How the PRM is called, one of [`~trl_grpo_ext.prm.formats.FORMATS`] or your own. By default told from the
            checkpoint.
        reduction (`str`, *optional*, defaults to `"last"`):
            How a completion's step scores become its reward: `"last"` (for labels made by sampling), `"min"`,
            `"product"` (for labels of people or judges) or `"mean"`.
        step_splitter (`Callable[[str], list[str]]`, *optional*):
            Splits a completion into steps where none are given. By default at the separator of the training, where the
            checkpoint says it, else at line ends.
        batch_size (`int`, *optional*, defaults to `8`):
            Number of completions in a forward pass; completions of similar length, or of one prompt, go together.
        max_length (`int`, *optional*):
            Longest input in tokens. Steps that end beyond it have no score (`None`) and are counted in
            `num_cut_steps`. By default that of the training, where the checkpoint says it.
        model_init_kwargs (`dict`, *optional*):
            Arguments for loading the model: `dtype`, `device_map`, `quantization_config`, `revision` and so on. A PRM
            that was trained on a quantized base is scored as it was trained with the same `quantization_config`.

    Raises:
        `ValueError`: if there is no such checkpoint, its format is not recognized, or an argument is out of range.
        `TypeError`: if `model` is neither a name nor a model.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prm_format: str | PRMFormat | None = None,
        reduction: str = "last",
        step_splitter: TextSplitter | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
    ):
        if reduction not in REDUCTIONS:
            raise unknown_choice("reduction", reduction, REDUCTIONS)
        super().__init__(model, tokenizer, batch_size, max_length)
        loaded: Any = None if isinstance(model, (str, Path)) else model
        name = self.name_or_path
        try:
            settings = read_settings(name)
            self.format = resolve_format(prm_format, settings, name, None if loaded is None else loaded.config)
            with loaded_whole():
                self.model = self.format.load(name, **(model_init_kwargs or {})) if loaded is None else loaded
            self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
        except (OSError, HFValidationError) as error:
            raise no_such_model(name, error) from error
        if loaded is None:
            self.move_to(PartialState().device)
        self.reduction = reduction
        self.step_splitter = step_splitter or SeparatorSplitter(settings.get("step_separator", "\n"))
        self.max_length = max_length or settings.get("max_length")
        self.max_completion_length: int | None = settings.get("max_completion_length")
        self.num_cut_steps = 0
        self.can_share_prefixes: bool | None = None  # not tried yet

    def __call__(self, prompts: list, completions: list, **kwargs) -> list[float | None]:
        """
        Reward function: one number a completion, by `reduction`.

        Args:
            prompts, completions (`list`):
                Plain or conversational.
            **kwargs:
                Other columns, unused; `log_metric` receives the share of steps cut off.

        Returns:
            `list[float | None]`: `None` for a completion of which a step is cut off by `max_length`.
        """
        steps = [self.step_splitter(completion_text(completion)) for completion in completions]
        scores = self.score_steps(prompts, completions, steps, log_metric=kwargs.get("log_metric"))
        return [self.reduce(row) for row in scores]

    def score_steps(
        self,
        prompts: list,
        completions: list,
        steps: list[list[str]],
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[list[float | None]]:
        """
        Step reward function: one number a step.

        Args:
            prompts, completions (`list`):
                Plain or conversational.
            steps (`list[list[str]]`):
                The steps of each completion.
            log_metric (`Callable`, *optional*):
                Receives the share of steps cut off.
            **kwargs:
                Other columns, unused.

        Returns:
            `list[list[float | None]]`: `None` for a step that is cut off by `max_length`.
        """
        scores = self.score(prompts, steps)
        if log_metric is not None and (self.max_length or self.max_completion_length):
            cut = [score is None for row in scores for score in row]
            log_metric(f"{self.__name__}/frac_steps_cut", sum(cut) / max(len(cut), 1))
        return scores

    def reduce(self, scores: list[float | None]) -> float | None:
        """One number from the scores of a completion's steps, `None` if one is missing: it could be the worst."""
        if not scores or None in scores:
            return None
        return REDUCTIONS[self.reduction](torch.tensor(scores)).item()

    @torch.no_grad()
    def score(self, prompts: Sequence[str | list], steps: Sequence[Sequence[str]]) -> list[list[float | None]]:
        """
        Score every step.

        Args:
            prompts (`Sequence`):
                The question of each completion, plain or conversational.
            steps (`Sequence[Sequence[str]]`):
                The steps of each completion.

        Returns:
            `list[list[float | None]]`: exactly one score a step, `None` for a step that ends beyond `max_length`.
        """
        if len(prompts) != len(steps) or isinstance(prompts, str) or any(isinstance(row, str) for row in steps):
            raise ValueError(
                f"`steps` has {len(steps)} entries for {len(prompts)} `prompts`; give one list of step texts a prompt."
            )
        encoded = [
            self.format.encode(self.tokenizer, prompt, row).truncated(self.max_length, self.max_completion_length)
            if row
            else EncodedSteps([], [])
            for prompt, row in zip(prompts, steps, strict=True)
        ]
        to_score = [row for row in encoded if row.positions]
        with in_eval_mode(self.model):
            scored = iter(self._score_rows(to_score))
        scores = [next(scored) if row.positions else [] for row in encoded]
        for row, row_steps in zip(scores, steps, strict=True):
            self.num_cut_steps += len(row_steps) - len(row)
            row += [None] * (len(row_steps) - len(row))
        return scores

    def _score_rows(self, rows: list[EncodedSteps]) -> list[list[float | None]]:
        # A model that cannot share has its rows cut by length alone
        shared_up_to = [0 if self.can_share_prefixes is False else row.positions[0] for row in rows]
        batches = prefix_batches([row.ids for row in rows], shared_up_to, self.batch_size)
        scores: dict[int, list[float | None]] = {}
        for indices, prefix_length in batches:
            batch = [rows[index] for index in indices]
            shares = prefix_length > 0 and self._can_share(batch, prefix_length)
            scores.update(zip(indices, self._score_batch(batch, prefix_length if shares else 0), strict=True))
        return [scores[index] for index in range(len(rows))]

    def _score_batch(self, encoded: list[EncodedSteps], prefix_length: int = 0) -> list[list[float | None]]:
        """Scores of rows, with the ids before `prefix_length` computed once for all rows that begin with them."""
        device = next(self.model.parameters()).device
        inputs: dict[str, Any] = pad_right([row.ids for row in encoded], 0, device)
        if prefix_length:
            backbone = backbone_of(self.model)
            cache_name = cache_argument(backbone)
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            beginning = number_prompts(ids, mask, prefix_length)
            cache = cache_of_rows(backbone, ids[:, :prefix_length], mask[:, :prefix_length], beginning, cache_name)
            inputs = {"input_ids": ids[:, prefix_length:], "attention_mask": mask, cache_name: cache}
        counts = [len(row.positions) for row in encoded]
        rows = torch.arange(len(encoded)).repeat_interleave(torch.tensor(counts)).to(device)
        positions = torch.tensor([position for row in encoded for position in row.positions], device=device)
        logits = self.format.step_logits(self.model, self.tokenizer, inputs, rows, positions - prefix_length)
        return [row.tolist() for row in self.format.to_scores(logits.float()).cpu().split(counts)]

    def _can_share(self, encoded: list[EncodedSteps], prefix_length: int) -> bool:
        """Whether the model's scores are the same where a beginning is computed once, tried on two rows at first."""
        if self.can_share_prefixes is None:
            try:
                difference = self._difference_by_sharing(encoded[:2], prefix_length)
                reason = f"its scores differ by {difference:.2g} on average if it does so once"
            except Exception as error:  # whatever a model that keeps no past raises
                difference, reason = float("inf"), f"it refused to do so once ({error})"
            limit = COARSE_ROUNDING if computes_coarsely(self.model) else ROUNDING
            self.can_share_prefixes = difference <= limit
            if not self.can_share_prefixes:
                logger.warning("The PRM computes a prompt for each of its completions: %s.", reason)
        return self.can_share_prefixes

    def _difference_by_sharing(self, encoded: list[EncodedSteps], prefix_length: int) -> float:
        shared, whole = (
            torch.tensor([score for row in self._score_batch(encoded, length) for score in row])
            for length in (prefix_length, 0)
        )
        return (shared - whole).abs().mean().item()


def read_settings(name_or_path: str) -> dict[str, Any]:
    """What [`PRMTrainer`] wrote beside a model, or nothing."""
    if not name_or_path:
        return {}
    file = cached_file(
        name_or_path,
        SETTINGS_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(file).read_text()) if file else {}


def write_settings(
    folder: Path, *, step_separator: str, max_length: int | None, max_completion_length: int | None
) -> None:
    """Write beside a model what it was trained to read, so that it is scored on the same."""
    settings = {
        "step_separator": step_separator,
        "max_length": max_length,
        "max_completion_length": max_completion_length,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def resolve_format(
    prm_format: str | PRMFormat | None, settings: dict[str, Any], name_or_path: str, config: Any
) -> PRMFormat:
    if isinstance(prm_format, PRMFormat):
        return prm_format
    if prm_format is not None:
        if prm_format not in FORMATS:
            raise unknown_choice("prm_format", prm_format, FORMATS)
        named = FORMATS[prm_format]
        if settings and isinstance(named, TokenClassificationFormat):
            return replace(named, separator=settings["step_separator"])
        return named
    if settings:
        return TokenClassificationFormat(settings["step_separator"])
    return detect_format(config or AutoConfig.from_pretrained(name_or_path), name_or_path)
