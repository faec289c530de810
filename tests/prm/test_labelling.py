import random

import pytest
import torch
from datasets import load_dataset

from trl_grpo_ext.files import PartStore
from trl_grpo_ext.generation import model_sampler
from trl_grpo_ext.prm.labelling import Solution, StepLabeller
from trl_grpo_ext.scripts import label_steps
from trl_grpo_ext.steps import SeparatorSplitter, cut_into_steps
from trl_grpo_ext.tasks import EMBEDDED_POLICY, make_dataset, working_reward

from ..tiny import prompt_dataset, tiny_model
from ..trainers.helpers import make_trainer


def solution_of(tokenizer, text, gold="7", prompt="Add:"):
    ids = tokenizer.encode(text)
    return Solution(tokenizer.encode(prompt), ids, cut_into_steps(ids, tokenizer, SeparatorSplitter()), gold)


class FakeSampler:
    """Comes right from a prefix as often as `chances` says of its last line."""

    def __init__(self, tokenizer, chances):
        self.tokenizer, self.chances = tokenizer, chances
        self.calls = []
        self.counts = {}

    def __call__(self, prefixes):
        self.calls.append(len(prefixes))
        continuations = []
        for prefix in prefixes:
            line = self.tokenizer.decode(prefix).strip().splitlines()[-1].removeprefix("Add:")
            self.counts[line] = self.counts.get(line, 0) + 1
            is_right = self.counts[line] <= self.chances[line] * 8
            continuations.append(self.tokenizer.encode("The answer is 7." if is_right else "The answer is 9."))
        return continuations


CHANCES = {"one": 1.0, "two": 0.75, "three": 0.25, "bad": 0.0}


class TestStepLabeller:
    def test_soft_labels_are_the_share_that_comes_right(self, tokenizer):
        sampler = FakeSampler(tokenizer, CHANCES)
        labels = StepLabeller(sampler, tokenizer)(
            [
                solution_of(tokenizer, "one\ntwo\nThe answer is 7."),
                solution_of(tokenizer, "three\nbad\nThe answer is 8."),
                solution_of(tokenizer, "The answer is 7."),
            ]
        )
        assert labels == [[1.0, 0.75, 1.0], [0.25, 0.0, 0.0], [1.0]]

    def test_hard_labels_say_whether_any_does(self, tokenizer):
        labeller = StepLabeller(FakeSampler(tokenizer, CHANCES), tokenizer, mode="hard")
        assert labeller([solution_of(tokenizer, "three\nbad\nThe answer is 8.")]) == [[1.0, 0.0, 0.0]]

    def test_prefixes_that_solutions_share_are_continued_once(self, tokenizer):
        sampler = FakeSampler(tokenizer, CHANCES)
        labeller = StepLabeller(sampler, tokenizer)
        labels = labeller(
            [
                solution_of(tokenizer, "one\ntwo\nThe answer is 7."),
                solution_of(tokenizer, "one\nthree\nThe answer is 7."),
                solution_of(tokenizer, "one\ntwo\nThe answer is 7."),
            ]
        )
        assert sampler.calls == [3 * 8]  # one, one-two, one-three
        assert labeller.num_sampled == 24
        assert [row[0] for row in labels] == [1.0] * 3

    def test_the_same_text_under_another_prompt_is_another_prefix(self, tokenizer):
        sampler = FakeSampler(tokenizer, CHANCES)
        StepLabeller(sampler, tokenizer)(
            [
                solution_of(tokenizer, "one\nThe answer is 7.", prompt="Add:\n"),
                solution_of(tokenizer, "one\nThe answer is 7.", prompt="Take:\n"),
            ]
        )
        assert sampler.calls == [16]

    @pytest.mark.parametrize("first_error", range(9))
    def test_binary_search_finds_the_first_error(self, tokenizer, first_error):
        chances = {f"s{k}": float(k < first_error) for k in range(8)}
        text = "".join(f"s{k}\n" for k in range(8)) + "The answer is 8."
        sampler = FakeSampler(tokenizer, chances)
        labels = StepLabeller(sampler, tokenizer, mode="first_error")([solution_of(tokenizer, text)])
        expected = [1.0 if k < first_error else 0.0 if k == first_error else None for k in range(9)]
        assert labels == [expected]
        exhaustive = 8 * 8
        assert sum(sampler.calls) <= 4 * 8 < exhaustive

    def test_binary_search_takes_the_steps_of_right_solutions_as_right(self, tokenizer):
        sampler = FakeSampler(tokenizer, CHANCES)
        labeller = StepLabeller(sampler, tokenizer, mode="first_error")
        assert labeller([solution_of(tokenizer, "bad\nThe answer is 7.")]) == [[1.0, 1.0]]
        assert sampler.calls == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mode": "best"}, "`mode` is 'best', but must be one of"),
            ({"num_continuations": 0}, "is 0, but must be 1"),
        ],
    )
    def test_bad_values_are_refused(self, tokenizer, options, message):
        with pytest.raises(ValueError, match=message):
            StepLabeller(lambda prefixes: [], tokenizer, **options)


class TestModelSampler:
    def test_continues_prefixes_of_unequal_length_as_alone(self, tokenizer):
        model = tiny_model(tokenizer)
        model.train()
        sample = model_sampler(model, tokenizer, max_new_tokens=4, temperature=1e-4, batch_size=3)
        prefixes = [tokenizer.encode(text) for text in ("Count 1:", "one two three", "a", "Add 3 and 4, then stop:")]
        together = sample(prefixes)
        assert model.training
        model.eval()
        for prefix, continuation in zip(prefixes, together, strict=True):
            ids = list(prefix)
            for token in continuation:
                with torch.no_grad():
                    best = model(torch.tensor([ids])).logits[0, -1].argmax().item()
                assert token == best
                ids.append(token)
                if token in model.generation_config.eos_token_id:
                    break

    def test_a_trainer_continues_prefixes_by_its_own_generation(self, tmp_path, tokenizer):
        trainer = make_trainer(tmp_path, tiny_model(tokenizer), prompt_dataset(), tokenizer, temperature=1e-4)
        prefixes = [tokenizer.encode(text) for text in ("Count 1:", "one two three")]
        sample = model_sampler(trainer.model, tokenizer, max_new_tokens=12, temperature=1e-4)
        ends = [*trainer.model.generation_config.eos_token_id, tokenizer.pad_token_id]
        for ours, theirs in zip(trainer.sample_continuations(prefixes), sample(prefixes), strict=True):
            stop = next((index for index, token in enumerate(theirs) if token in ends), len(theirs))
            assert ours[:stop] == theirs[:stop]

    def test_labels_estimate_the_chance_of_a_right_answer(self):
        """Of a policy that slips at random, a prefix that is right so far is mostly worth it, a wrong one nothing."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED_POLICY)
        torch.manual_seed(0)
        rows = make_dataset(12, seed=7).to_list()
        sample = model_sampler(model, tokenizer, max_new_tokens=64, batch_size=256)
        labeller = StepLabeller(sample, tokenizer, num_continuations=8)
        labelled = label_steps.label_part(rows, 2, tokenizer, sample, labeller, SeparatorSplitter())
        equations = [row["equations"] for row in rows for _ in range(2)]
        reachable = working_reward(
            [row["completions"] for row in labelled], equations, [row["solution"] for row in labelled]
        )
        by_rule = {0.0: [], 1.0: []}
        for row, rule in zip(labelled, reachable, strict=True):
            for label, can_come_right in zip(row["labels"][:-1], rule[:-1], strict=True):
                by_rule[can_come_right].append(label)
        means = {rule: sum(labels) / len(labels) for rule, labels in by_rule.items()}
        assert means[1.0] > 0.5
        assert means[0.0] < 0.1


def test_a_killed_job_goes_on_and_ends_with_the_same_labels(tmp_path, monkeypatch):
    def run(folder):
        label_steps.run(
            ["--num_problems", "6", "--num_solutions", "2", "--num_continuations", "2", "--problems_per_part", "2",
             "--output_dir", str(tmp_path / folder)]
        )  # fmt: skip
        return load_dataset(str(tmp_path / folder), split="train").to_list()

    whole = run("whole")
    write = PartStore.write
    killed_at = random.Random(0).choice([1, 2])

    def killed(self, part, rows):
        if part == killed_at:
            raise KeyboardInterrupt
        write(self, part, rows)

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    assert len(list((tmp_path / "killed").glob("*.parquet"))) == killed_at
    assert run("killed") == whole
