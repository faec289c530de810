"""
A completion cut into reasoning steps, as exact token spans.

The spans are found on the sampled ids: each token is decoded in its place, and a step ends with the token that
completes its separator. Nothing is tokenized again, so fused tokens (`".\\n\\n"`) and characters spread over several
tokens are attributed as they were sampled.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


TextSplitter = Callable[[str], list[str]]

# Patterns for `step_separator` with `step_separator_is_regex`
STEP_MARKERS = r"(?im)(?=^[ \t]*(?:[#*]+[ \t]*)?step[ \t]+\d+[ \t]*[:.)*])"
r"""Before "Step 3:" at the start of a line, in whatever case, also as a heading or in bold."""
SENTENCES = (
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bvs\.)"
    r"[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9$\\])"
)
r"""Between sentences of a paragraph, not within numbers nor after initials and titles."""
THINKING = r"\n{2,}|</think>\s*"
r"""After a `<think>` block, and between the paragraphs within it and after it."""


@dataclass(frozen=True)
class Steps:
    """
    The reasoning steps of one completion.

    Args:
        texts (`list[str]`):
            Text of each step, separator included; joined they give the completion's text.
        ends (`list[int]`):
            Index, in completion tokens, of each step's last token, strictly ascending. The last step ends with the
            completion's last token, EOS included.
    """

    texts: list[str]
    ends: list[int]


class SeparatorSplitter:
    r"""
    Split a text after each separator.

    A piece without content of its own (nothing but separators and whitespace) belongs to the step before it, or to the
    first step at the start of the text, so that no step is empty.

    Args:
        separator (`str`, *optional*, defaults to `"\n"`):
            What stands between two steps.
        is_regex (`bool`, *optional*, defaults to `False`):
            Whether `separator` is a regular expression. One of zero width, such as `"(?=Step \d+:)"`, splits before
            what it looks ahead to.

    Raises:
        `ValueError`: if `separator` is no text, is empty, is no regular expression, or matches everywhere.
    """

    def __init__(self, separator: str = "\n", is_regex: bool = False):
        if not isinstance(separator, str):
            raise ValueError(f"`step_separator` is {separator!r}, but must be a text.")
        try:
            self.pattern = re.compile(separator if is_regex else re.escape(separator))
        except re.error as error:
            raise ValueError(
                f"`step_separator` is {separator!r}, which is no regular expression ({error}); correct it, or set "
                "`step_separator_is_regex=False` to take it literally."
            ) from error
        if self.pattern.fullmatch(""):
            raise ValueError(
                f"`step_separator` is {separator!r}, which matches the empty string and would split everywhere; use "
                "one that matches at least a character or looks ahead to one."
            )

    def __call__(self, text: str) -> list[str]:
        cuts = sorted({0, len(text), *(match.end() for match in self.pattern.finditer(text))})
        steps: list[str] = []
        for start, end in pairwise(cuts):
            if steps and (self.is_blank(steps[-1]) or self.is_blank(text[start:end])):
                steps[-1] += text[start:end]
            else:
                steps.append(text[start:end])
        return steps or [text]

    def is_blank(self, text: str) -> bool:
        return not self.pattern.sub("", text).strip()


def from_command_line(separator: str) -> str:
    r"""A separator as it is meant: a shell passes a line end as the two characters `\n`."""
    return separator.replace("\\n", "\n")


def cut_into_steps(completion_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, splitter: TextSplitter) -> Steps:
    """
    Cut the sampled ids of a completion into steps.

    Args:
        completion_ids (`Sequence[int]`):
            Ids of the completion as sampled, without padding.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer that the ids belong to. Special tokens have no text.
        splitter (`Callable[[str], list[str]]`):
            Splits the completion's text into pieces that, joined, give it back.

    Returns:
        [`Steps`]. There is at least one. A token whose text reaches over a step's end belongs to that step, the bytes
        of a character to the step that completes it, and a piece that is left with no token of its own to the step
        after it.

    Raises:
        `ValueError`: if the splitter's pieces do not give the text back.
        `TypeError`: if the splitter returns no list of texts.
    """
    text_ends, text = decode_in_place(completion_ids, tokenizer)
    pieces = splitter(text)
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise TypeError(f"`step_splitter` returned {pieces!r}; it must return a list of texts.")
    if "".join(pieces) != text:
        raise ValueError(
            f"`step_splitter` returned pieces that do not give the completion back ({pieces!r} for {text!r}); it must "
            "only choose where to cut, not change the text."
        )
    last_token = len(completion_ids) - 1
    texts: list[str] = []
    ends: list[int] = []
    carried = ""
    for piece, text_end in zip(pieces[:-1], accumulate(map(len, pieces)), strict=False):
        carried += piece
        end = bisect_left(text_ends, text_end)
        if end >= last_token:
            break
        if not ends or end > ends[-1]:
            texts.append(carried)
            ends.append(end)
            carried = ""
    return Steps(texts=[*texts, text[sum(map(len, texts)) :]], ends=[*ends, last_token])


def filler_share(steps: Sequence[str]) -> float:
    """
    Share of a completion's steps that say nothing: without a letter or digit, or the same as an earlier one.

    Args:
        steps (`Sequence[str]`):
            The steps of one completion.

    Returns:
        `float`, in 0 to 1.
    """
    contents = [" ".join(step.split()) for step in steps]
    says_something = {content for content in contents if any(map(str.isalnum, content))}
    return 1 - len(says_something) / max(len(contents), 1)


def decode_in_place(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """
    Decode ids one by one.

    Returns:
        The number of characters of the text up to and including each token, and the text without special tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        prefixes = [tokenizer.decode(ids[: index + 1], skip_special_tokens=True) for index in range(len(ids))]
        return [len(prefix.rstrip("\ufffd")) for prefix in prefixes], prefixes[-1]
    stream = DecodeStream(skip_special_tokens=True)
    chunks = [stream.step(backend, int(token_id)) or "" for token_id in ids]
    text = "".join(chunks)
    return list(accumulate(map(len, chunks))), text
