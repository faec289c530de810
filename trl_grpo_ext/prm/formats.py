"""
How published process reward models (PRMs) are called: what text they read, and where each step's score stands.

A format turns a question and its steps into ids with one position a step, and the model's outputs at these positions
into scores. Scores are read at positions that are known from the encoding, in which special tokens and tags are the
format's alone: what policies write of them is left out.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.utils import find_adapter_config_file

from ..rewards.answer import completion_text
from .heads import Qwen2ForProcessRewardModel, Qwen2ForStepValues


HEADS = ("score", "classifier", "v_head")  # what classification heads are called


def is_head(parameter_name: str) -> bool:
    """Whether a parameter of this name belongs to a classification head, of a model with or without adapters."""
    return any(part in HEADS for part in parameter_name.split("."))


@dataclass(frozen=True)
class EncodedSteps:
    """
    What a PRM reads of one completion.

    Args:
        ids (`list[int]`):
            Ids of question and steps.
        positions (`list[int]`):
            Index in `ids` of the token at which each step is scored, ascending.
        prompt_length (`int`, *optional*, defaults to `0`):
            Number of ids before the first step, for a format that limits the completion's length.
    """

    ids: list[int]
    positions: list[int]
    prompt_length: int = 0

    def truncated(self, max_length: int | None, max_completion_length: int | None = None) -> "EncodedSteps":
        """As many ids as both lengths allow, from the start, with the steps that are scored within them."""
        limits = [len(self.ids) if max_length is None else max_length]
        if max_completion_length is not None:
            limits.append(self.prompt_length + max_completion_length)
        limit = min(limits)
        return EncodedSteps(self.ids[:limit], [p for p in self.positions if p < limit], self.prompt_length)


class PRMFormat(ABC):
    """
    One way to call a PRM. Subclass it, or use one of [`FORMATS`], and [`register_prm_format`] it under a name.

    What a score means depends on the labels that the model was trained on: those of people or a judge say "right so
    far", those made by sampling continuations (Math-Shepherd) estimate the chance that the answer comes out right.
    With the former, the sum over steps pays for easy additional steps; `step_credit="min"` or `"step"` does not.
    """

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        """
        Write question and steps as the model was trained to read them.

        Args:
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
                The PRM's tokenizer.
            prompt (`str` or `list` of messages):
                The question, plain or conversational.
            steps (`Sequence[str]`):
                Text of each step; trailing whitespace and separators are the format's to write.

        Returns:
            [`EncodedSteps`], with exactly one position a step.
        """

    @abstractmethod
    def load(self, name_or_path: str, **model_init_kwargs) -> PreTrainedModel:
        """Load a checkpoint of this format."""

    def step_logits(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        inputs: dict[str, torch.Tensor],
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The model's outputs (N, C) at N positions, from one forward pass over `inputs` (B, T)."""
        return model(**inputs).logits[rows, positions]

    @abstractmethod
    def to_scores(self, step_logits: torch.Tensor) -> torch.Tensor:
        """Scores (N,) from outputs (N, C) in float32."""


@dataclass(frozen=True)
class TokenClassificationFormat(PRMFormat):
    r"""
    Two classes at a separator after each step: models of TRL's former PRMTrainer and of [`PRMTrainer`].

    Ids are those of prompt, step, separator, step, separator and so on, each tokenized on its own, after BOS where the
    tokenizer has one. Nothing stands between prompt and first step.

    Args:
        separator (`str`, *optional*, defaults to `"\n"`):
            Must be that of the training.
        signed (`bool`, *optional*, defaults to `False`):
            Whether a score is p(right) - p(wrong), in -1 to 1, as PURE (arXiv:2504.15275) has it, instead of p(right).
    """

    separator: str = "\n"
    signed: bool = False

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        ids = prompt_ids(tokenizer, prompt)
        prompt_length = len(ids)
        separator_ids = tokenizer.encode(self.separator, add_special_tokens=False)
        visible = self.separator.strip()
        if not separator_ids:
            raise ValueError(
                f"`step_separator` is {self.separator!r}, for which the PRM's tokenizer has no token; name another."
            )
        positions = []
        for step in steps:
            text = plain_text(tokenizer, step).rstrip()
            if visible:  # the step may come with it, or without
                text = text.removesuffix(visible).rstrip()
            ids += tokenizer.encode(text, add_special_tokens=False) + separator_ids
            positions.append(len(ids) - 1)
        return EncodedSteps(ids, positions, prompt_length)

    def load(self, name_or_path: str, **model_init_kwargs) -> PreTrainedModel:
        if find_adapter_config_file(name_or_path) is not None:
            from peft import AutoPeftModelForTokenClassification

            return AutoPeftModelForTokenClassification.from_pretrained(
                name_or_path, num_labels=2, is_trainable=True, **keep_head(model_init_kwargs)
            )
        model, info = AutoModelForTokenClassification.from_pretrained(
            name_or_path, output_loading_info=True, **keep_head(model_init_kwargs)
        )
        if missing := [name for name in info["missing_keys"] if name.split(".")[0] in HEADS]:
            raise ValueError(
                f"`model` is {name_or_path!r}, which has no trained head ({', '.join(sorted(missing))} are not in "
                "it); train one with PRMTrainer, or name another checkpoint or `prm_format`."
            )
        return model

    def to_scores(self, step_logits: torch.Tensor) -> torch.Tensor:
        if step_logits.shape[-1] != 2:
            raise ValueError(
                f"`model` has {step_logits.shape[-1]} outputs a token, but this format needs the two classes of a "
                "token classifier."
            )
        right = step_logits.softmax(-1)[:, 1]
        return 2 * right - 1 if self.signed else right


@dataclass(frozen=True)
class QwenFormat(PRMFormat):
    r"""
    Qwen2.5-Math-PRM (arXiv:2501.07301): a chat whose answer has a tag after each step, two classes at the tag.

    Args:
        system (`str`, *optional*):
            System message; ReasonFlux-PRM has none.
        tag (`str`, *optional*, defaults to `"<extra_0>"`):
            Special token after each step.
    """

    system: str | None = r"Please reason step by step, and put your final answer within \boxed{}."
    tag: str = "<extra_0>"

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        tag_id = single_token(tokenizer, self.tag)
        answer = "".join(plain_text(tokenizer, step, self.tag).strip() + self.tag for step in steps)
        messages = [
            *([{"role": "system", "content": self.system}] if self.system else []),
            {"role": "user", "content": plain_text(tokenizer, question_of(prompt), self.tag)},
            {"role": "assistant", "content": answer},
        ]
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
        return at_tags(ids, tag_id, steps, self.tag)

    def load(self, name_or_path: str, **model_init_kwargs) -> PreTrainedModel:
        # Its remote code does not run on current transformers; this class has the same weights.
        config = Qwen2Config.from_pretrained(name_or_path)
        return Qwen2ForProcessRewardModel.from_pretrained(name_or_path, config=config, **keep_head(model_init_kwargs))

    def to_scores(self, step_logits: torch.Tensor) -> torch.Tensor:
        return step_logits.softmax(-1)[:, 1]


class VocabularyFormat(PRMFormat):
    """Causal language models that answer with one of two tokens; a score is the probability of the first."""

    verdicts: ClassVar[tuple[str, str]] = ("+", "-")

    def load(self, name_or_path: str, **model_init_kwargs) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(name_or_path, **model_init_kwargs)

    def step_logits(self, model, tokenizer, inputs, rows, positions):
        # Project to the vocabulary at the scored positions only
        hidden = backbone_of(model)(**inputs).last_hidden_state[rows, positions]
        ids = [tokenizer.encode(verdict, add_special_tokens=False)[-1] for verdict in self.verdicts]
        return model.get_output_embeddings()(hidden)[:, ids]

    def to_scores(self, step_logits: torch.Tensor) -> torch.Tensor:
        return step_logits.softmax(-1)[:, 0]


@dataclass(frozen=True)
class MathShepherdFormat(VocabularyFormat):
    """Math-Shepherd (arXiv:2312.08935): a tag after each step, at which the logits of + and - are compared."""

    tag: str = "ки"

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        texts = [plain_text(tokenizer, step, self.tag) for step in steps]
        lines = [f"{numbered(text, index)} {self.tag}" for index, text in enumerate(texts, start=1)]
        question = plain_text(tokenizer, question_of(prompt), self.tag)
        ids = tokenizer.encode("\n".join([f"{question} {lines[0]}", *lines[1:]]))
        tag_id = tokenizer.encode(self.tag, add_special_tokens=False)[-1]
        return at_tags(ids, tag_id, steps, self.tag)


@dataclass(frozen=True)
class RLHFlowFormat(VocabularyFormat):
    """RLHFlow's PRMs: each step is a turn of the user, answered by + or -; what they read is always answered by +."""

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        messages: list[dict[str, str]] = []
        questions = []  # ids up to each verdict; the token before it predicts it
        for index, step in enumerate(steps):
            text = plain_text(tokenizer, step).strip()
            content = f"{plain_text(tokenizer, question_of(prompt))} {text}" if index == 0 else text
            messages.append({"role": "user", "content": content})
            asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            questions.append(tokenizer.encode(asked, add_special_tokens=False))
            messages.append({"role": "assistant", "content": self.verdicts[0]})
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
        if any(ids[: len(question)] != question for question in questions):
            raise ValueError(
                "The PRM's chat template writes a turn otherwise once later ones follow, so that its steps cannot be "
                "found; use a template that keeps turns as they are."
            )
        return EncodedSteps(ids, [len(question) - 1 for question in questions])


@dataclass(frozen=True)
class SkyworkFormat(PRMFormat):
    """Skywork-o1-Open-PRM: question and steps on lines of their own, a value head at the end of each step's line."""

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list, steps: Sequence[str]) -> EncodedSteps:
        newline = single_token(tokenizer, "\n")
        question = plain_text(tokenizer, question_of(prompt))
        ids = tokenizer.encode((tokenizer.bos_token or "") + question + "\n", add_special_tokens=False)
        positions = []
        for step in steps:
            ids += [*tokenizer.encode(plain_text(tokenizer, step).strip(), add_special_tokens=False), newline]
            positions.append(len(ids) - 1)
        return EncodedSteps(ids, positions)

    def load(self, name_or_path: str, **model_init_kwargs) -> PreTrainedModel:
        return Qwen2ForStepValues.from_pretrained(name_or_path, **keep_head(model_init_kwargs))

    def to_scores(self, step_logits: torch.Tensor) -> torch.Tensor:
        return step_logits.sigmoid().squeeze(-1)


FORMATS: dict[str, PRMFormat] = {
    "token_classification": TokenClassificationFormat(),
    "pure": TokenClassificationFormat(signed=True),
    "qwen": QwenFormat(),
    "reasonflux": QwenFormat(system=None),
    "math_shepherd": MathShepherdFormat(),
    "rlhflow": RLHFlowFormat(),
    "skywork": SkyworkFormat(),
}

# What a checkpoint of another architecture than its format's own is recognized by, in its name
NAMES = {
    "math-shepherd": "math_shepherd",
    "rlhflow": "rlhflow",
    "skywork-o1-open-prm": "skywork",
    "reasonflux-prm": "reasonflux",
    "pure-prm": "pure",
}


def register_prm_format(name: str, prm_format: PRMFormat) -> None:
    """
    Make a format known by a name, for `prm_format` of [`ProcessRewardModel`].

    Args:
        name (`str`):
            The name.
        prm_format ([`PRMFormat`]):
            The format.

    Raises:
        `TypeError`: if it is no [`PRMFormat`].
        `ValueError`: if the name is taken.
    """
    if not isinstance(prm_format, PRMFormat):
        raise TypeError(f"`prm_format` is {prm_format!r}, which is no PRMFormat; subclass PRMFormat.")
    if name in FORMATS:
        raise ValueError(f"`name` is {name!r}, which is taken; choose another.")
    FORMATS[name] = prm_format


def detect_format(config: Any, name_or_path: str) -> PRMFormat:
    """
    The format of a published checkpoint, from its architecture and name.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The checkpoint's configuration.
        name_or_path (`str`):
            Its Hub id or folder.

    Raises:
        `ValueError`: if it is not recognized.
    """
    for part, name in NAMES.items():
        if part in name_or_path.lower():
            return FORMATS[name]
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if architecture == "Qwen2ForProcessRewardModel":
        return FORMATS["qwen"]
    if architecture.endswith("ForTokenClassification"):
        return FORMATS["token_classification"]
    raise ValueError(
        f"`model` is {name_or_path!r} ({architecture or 'of no known architecture'}), which is not recognized as a "
        f"process reward model; name its `prm_format`, one of {', '.join(map(repr, FORMATS))} or your own."
    )


def question_of(prompt: str | list) -> str:
    """The question as text: a plain prompt, or what the user said last."""
    if isinstance(prompt, str):
        return prompt
    said = [message for message in prompt if message["role"] == "user"]
    return completion_text(said[-1:])


def plain_text(tokenizer: PreTrainedTokenizerBase, text: str, tag: str | None = None) -> str:
    """A text without what the PRM would read as a special token or a tag: a policy must not be able to write these."""
    for token in [*tokenizer.all_special_tokens, *([tag] if tag else [])]:
        text = text.replace(token, "")
    return text


def keep_head(model_init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for loading a model quantized, if at all, but for its head: that is small, and has odd sizes."""
    quantization = model_init_kwargs.get("quantization_config")
    if quantization is not None and hasattr(quantization, "llm_int8_skip_modules"):
        quantization = copy.deepcopy(quantization)
        quantization.llm_int8_skip_modules = sorted({*(quantization.llm_int8_skip_modules or []), *HEADS})
        return {**model_init_kwargs, "quantization_config": quantization}
    return model_init_kwargs


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list) -> list[int]:
    """Ids of a prompt with exactly one BOS where the tokenizer has one; conversations by its chat template."""
    if not isinstance(prompt, str) and tokenizer.chat_template is not None:
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt if isinstance(prompt, str) else question_of(prompt), add_special_tokens=False)
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"The PRM's tokenizer writes {text!r} as {len(ids)} tokens, but this format needs it as one.")
    return ids[0]


def at_tags(ids: list[int], tag_id: int, steps: Sequence[str], tag: str) -> EncodedSteps:
    positions = [position for position, token in enumerate(ids) if token == tag_id]
    if len(positions) != len(steps):
        raise ValueError(
            f"The PRM's input has {len(positions)} tags {tag!r} for {len(steps)} steps; the tokenizer must write the "
            "tag as a token of its own."
        )
    return EncodedSteps(ids, positions)


def numbered(step: str, index: int) -> str:
    """A step as Math-Shepherd writes it, with its number in front."""
    step = step.strip()
    return step if step.lower().startswith("step ") else f"Step {index}: {step}"


def backbone_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a causal language model that gives hidden states, adapters included."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.base_model
