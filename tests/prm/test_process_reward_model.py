import copy
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2ForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
)
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import shared_prefix
from trl_grpo_ext.prm import ProcessRewardModel, process_reward_model
from trl_grpo_ext.prm.formats import backbone_of

from ..tiny import prompt_dataset
from ..trainers.helpers import generation_batch, make_trainer, process_options


PROMPTS = ["How many are 3 + 4?", "And 5 - 1?", "What is half of 10, if anything?"]
STEPS = [["3 + 4 = 7\n", "It is 7."], ["4"], ["10 / 2 = 5\n", "so\n", "it\n", "is 5."]]


def tiny_prm(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=2, max_position_embeddings=4096, initializer_range=0.3,
        **{**sizes, **options},
    )  # fmt: skip
    return LlamaForTokenClassification(config)


@pytest.fixture
def prm(tokenizer):
    return ProcessRewardModel(tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="token_classification")


class TestScore:
    def test_rows_do_not_change_each_other(self, prm):
        together = prm.score(PROMPTS, STEPS)
        for batch_size in (1, 2):
            prm.batch_size = batch_size
            for row, other in zip(prm.score(PROMPTS, STEPS), together, strict=True):
                assert row == pytest.approx(other, abs=1e-5)
        apart = [prm.score([prompt], [steps])[0] for prompt, steps in zip(PROMPTS, STEPS, strict=True)]
        for row, other in zip(apart, together, strict=True):
            assert row == pytest.approx(other, abs=1e-5)

    def test_no_steps_many_steps_and_empty_completions(self, prm):
        rows = prm.score(["a"] * 4, [[], ["x\n"] * 200, [""], ["3 + 4 = 7\n", "It"]])
        assert [len(row) for row in rows] == [0, 200, 1, 2]
        assert all(0 < score < 1 for row in rows for score in row)
        assert prm.score([], []) == []

    def test_a_model_in_train_mode_scores_in_eval_mode_and_is_left_as_it_was(self, tokenizer):
        model = tiny_prm(tokenizer, attention_dropout=0.5)
        model.dropout.p = 0.5
        prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification")
        expected = prm.score(PROMPTS, STEPS)
        model.train()
        assert prm.score(PROMPTS, STEPS) == expected
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())

    @pytest.mark.parametrize("padding", ["none", "eos"])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_the_tokenizers_padding_does_not_matter(self, tokenizer, padding, side):
        expected = ProcessRewardModel(tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="pure").score(
            PROMPTS, STEPS
        )
        other = copy.deepcopy(tokenizer)
        other.padding_side = side
        other.pad_token = None if padding == "none" else other.eos_token
        prm = ProcessRewardModel(tiny_prm(other), tokenizer=other, prm_format="pure")
        assert prm.score(PROMPTS, STEPS) == expected

    def test_steps_beyond_the_length_have_no_score_and_are_counted(self, tokenizer):
        whole = ProcessRewardModel(tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="token_classification")
        length = len(whole.format.encode(tokenizer, PROMPTS[2], STEPS[2][:2]).ids)
        prm = ProcessRewardModel(
            tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="token_classification", max_length=length
        )
        row = prm.score(PROMPTS[2:], STEPS[2:])[0]
        assert row[:2] == pytest.approx(whole.score(PROMPTS[2:], STEPS[2:])[0][:2], abs=1e-5)
        assert row[2:] == [None, None]
        assert prm.num_cut_steps == 2
        logged = {}
        prm.score_steps(PROMPTS[2:], [""], STEPS[2:], log_metric=logged.__setitem__)
        assert list(logged.values()) == [0.5]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_gives_one_score_a_step(self, tokenizer, dtype):
        # A two-class softmax in float16 underflows to 0 from a gap of 18 on, by which a score could be taken for none.
        model = tiny_prm(tokenizer)
        model.score.bias.data = torch.tensor([30.0, -30.0])
        prm = ProcessRewardModel(model.to(dtype), tokenizer=tokenizer, prm_format="token_classification")
        rows = prm.score(PROMPTS, STEPS)
        assert [len(row) for row in rows] == [2, 1, 4]
        assert all(0 < score < 1e-9 for row in rows for score in row)

    def test_an_adapted_and_a_quantized_model_score(self, tokenizer, tmp_path):
        adapted = get_peft_model(tiny_prm(tokenizer), LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"]))
        prm = ProcessRewardModel(adapted, tokenizer=tokenizer, prm_format="token_classification")
        assert len(prm.score(PROMPTS, STEPS)[2]) == 4
        tiny_prm(tokenizer, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        exact = ProcessRewardModel(str(tmp_path)).score(PROMPTS, STEPS)
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        prm = ProcessRewardModel(str(tmp_path), model_init_kwargs={"quantization_config": nf4})
        quantized = prm.score(PROMPTS, STEPS)
        assert [len(row) for row in quantized] == [2, 1, 4]
        assert all(0 < score < 1 for row in quantized for score in row)
        assert quantized != exact
        # the head is kept as it is, without being asked to
        assert not nf4.llm_int8_skip_modules
        assert prm.model.score.weight.dtype == torch.float32


GROUPS = [prompt for prompt in PROMPTS for _ in range(3)]
COMPLETIONS = [*STEPS, *reversed(STEPS), ["9\n"] * 4, ["no"], ["3 + 4 = 7\n", "yes"]]


def assert_same_scores(ours, theirs, tolerance=1e-5):
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, abs=tolerance)


def computed_tokens(prm):
    """Collects how many tokens each forward pass of a PRM's backbone computes."""
    computed = []
    backbone_of(prm.model).register_forward_pre_hook(
        lambda _, args, kwargs: computed.append((args[0] if args else kwargs["input_ids"]).numel()),
        with_kwargs=True,
    )
    return computed


@pytest.mark.usefixtures("free_passes")
class TestPromptsComputedOnce:
    @pytest.mark.parametrize("batch_size", [2, 3, 8])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_scores_are_those_of_rows_on_their_own(self, prm, attention, batch_size):
        prm.model.set_attn_implementation(attention)
        alone = [prm.score([prompt], [steps])[0] for prompt, steps in zip(GROUPS, COMPLETIONS, strict=True)]
        assert prm.can_share_prefixes is None
        prm.batch_size = batch_size
        together = prm.score(GROUPS, COMPLETIONS)
        assert prm.can_share_prefixes
        assert_same_scores(together, alone)

    def test_fewer_tokens_are_computed(self, prm):
        prm.batch_size = 3
        computed = computed_tokens(prm)
        prm.score(GROUPS, COMPLETIONS)
        computed.clear()  # the first time it is tried
        prm.score(GROUPS, COMPLETIONS)
        shared = sum(computed)
        computed.clear()
        prm.can_share_prefixes = False
        prm.score(GROUPS, COMPLETIONS)
        assert shared < 0.8 * sum(computed)

    def test_absolute_positions(self, tokenizer):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, num_labels=2)
        model = GPT2ForTokenClassification(config)
        prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification")
        together = prm.score(GROUPS, COMPLETIONS)
        assert prm.can_share_prefixes
        prm.can_share_prefixes = False
        assert_same_scores(together, prm.score(GROUPS, COMPLETIONS))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_with_adapters_and_in_half_precision(self, tokenizer, dtype):
        adapters = LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(tiny_prm(tokenizer).to(dtype), adapters)
        prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification")
        together = prm.score(GROUPS, COMPLETIONS)
        assert prm.can_share_prefixes
        prm.can_share_prefixes = False
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        assert_same_scores(together, prm.score(GROUPS, COMPLETIONS), tolerance)

    def test_a_model_that_keeps_no_past_reads_whole_rows_and_says_so(self, tokenizer, caplog):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = BertForTokenClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes)).eval()
        prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification")
        alone = [prm.score([prompt], [steps])[0] for prompt, steps in zip(GROUPS, COMPLETIONS, strict=True)]
        for _ in range(2):
            assert_same_scores(prm.score(GROUPS, COMPLETIONS), alone)
        assert prm.can_share_prefixes is False
        assert caplog.text.count("computes a prompt for each of its completions: it refused to do so once") == 1

    def test_a_model_that_cannot_has_its_rows_cut_by_length(self, prm, monkeypatch):
        prm.can_share_prefixes, prm.batch_size = False, 3
        lengths = []
        score_batch = prm._score_batch

        def record(encoded, prefix_length):
            assert prefix_length == 0
            lengths.append([len(row.ids) for row in encoded])
            return score_batch(encoded, prefix_length)

        monkeypatch.setattr(prm, "_score_batch", record)
        prm.score(GROUPS, COMPLETIONS)
        assert all(min(first) >= max(second) for first, second in pairwise(lengths))

    def test_a_model_whose_scores_would_differ_reads_whole_rows_and_says_so(self, prm, caplog, monkeypatch):
        expected = prm.score(GROUPS[:1], COMPLETIONS[:1])[0]

        def empty_past(model, input_ids, *args, **kwargs):
            cache = shared_prefix.cache_of_rows(model, input_ids, *args, **kwargs)
            for layer in cache.layers:
                layer.values.zero_()
            return cache

        monkeypatch.setattr(process_reward_model, "cache_of_rows", empty_past)
        assert prm.score(GROUPS, COMPLETIONS)[0] == pytest.approx(expected, abs=1e-5)
        assert prm.can_share_prefixes is False
        assert caplog.text.count("its scores differ by") == 1


class TestAsRewardFunction:
    @pytest.mark.parametrize("reduction", ["last", "min", "mean", "product"])
    def test_reduces_the_scores_of_a_completion(self, tokenizer, reduction):
        prm = ProcessRewardModel(
            tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="token_classification", reduction=reduction
        )
        completions = ["".join(steps) for steps in STEPS]
        rewards = prm(prompts=PROMPTS, completions=completions, completion_ids=None)
        messages = [[{"role": "assistant", "content": completion}] for completion in completions]
        assert prm(prompts=PROMPTS, completions=messages) == rewards
        for reward, row in zip(rewards, prm.score_steps(PROMPTS, completions, STEPS), strict=True):
            product = torch.tensor(row).prod().item()
            expected = {"last": row[-1], "min": min(row), "mean": sum(row) / len(row), "product": product}[reduction]
            assert reward == pytest.approx(expected)

    def test_none_where_a_step_could_not_be_scored(self, tokenizer):
        # else a completion could ramble beyond the limit and keep the score of its beginning
        length = len(tokenizer.encode("q" + "a\n" * 2))
        prm = ProcessRewardModel(
            tiny_prm(tokenizer), tokenizer=tokenizer, prm_format="token_classification", max_length=length
        )
        assert prm(["q", "q"], ["a\na", "a\na\na"])[0] is not None
        assert prm(["q", "q"], ["a\na", "a\na\na"])[1] is None

    def test_a_column_of_the_data_set_is_not_taken_for_the_steps(self, prm):
        assert prm(PROMPTS, ["a", "b", "c"], steps=[["gold"]] * 3) == prm(PROMPTS, ["a", "b", "c"])

    def test_trains_a_plain_trl_trainer(self, tmp_path, prm, model, tokenizer):
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, GRPOTrainer, GRPOConfig, reward_funcs=prm, max_steps=1
        )
        trainer.train()
        log = trainer.state.log_history[0]
        assert 0 < log["rewards/LlamaForTokenClassification/mean"] < 1
        assert log["grad_norm"] > 0

    @pytest.mark.parametrize("given", ["scorer", "model", "folder"])
    def test_scores_steps_for_our_trainer(self, tmp_path, prm, model, tokenizer, given):
        # The folder's tokenizer differs from the policy's: the mapping back is by step.
        prm.model.save_pretrained(tmp_path / "prm")
        tokenizer.save_pretrained(tmp_path / "prm")
        prm.model.config._name_or_path = str(tmp_path / "prm")
        step_reward_funcs = {"scorer": prm, "model": prm.model, "folder": str(tmp_path / "prm")}[given]
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=step_reward_funcs)
        )
        rows = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        trainer._generate_and_score_completions(rows)
        steps = [list(completion.texts) for completion in trainer._steps]
        expected = prm.score([row["prompt"] for row in rows], steps)
        for ours, row in zip(trainer._step_rewards.tolist(), expected, strict=True):
            assert ours[: len(row)] == pytest.approx(row, abs=1e-5)

    def test_a_prm_of_another_vocabulary_scores_by_step(self, tmp_path, model, tokenizer):
        from trl_grpo_ext.tasks.tokenizer import build_tokenizer

        other = build_tokenizer(vocab_size=280, num_problems=20)
        prm = ProcessRewardModel(tiny_prm(other), tokenizer=other, prm_format="token_classification")
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=prm))
        batch = generation_batch(trainer)
        assert batch["advantages"].shape == batch["completion_ids"].shape
        assert [len(completion.ends) for completion in trainer._steps] == [
            int((~row.isnan()).sum()) for row in trainer._step_rewards
        ]


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"reduction": "sum"}, "`reduction` is 'sum', but must be one of 'last', 'min', 'mean', 'product'"),
            ({"batch_size": 0}, "`batch_size` is 0, but must be 1 or more"),
            ({"max_length": 0}, "`max_length` is 0, but must be 1 or more"),
            ({"prm_format": "orm"}, "`prm_format` is 'orm', but must be one of 'token_classification'"),
        ],
    )
    def test_bad_values_are_refused(self, tokenizer, options, message):
        with pytest.raises(ValueError, match=message):
            ProcessRewardModel(tiny_prm(tokenizer), tokenizer=tokenizer, **options)

    def test_what_is_no_model_is_refused(self):
        with pytest.raises(TypeError, match="`model` is 5, but must be a Hub id, a folder or a loaded model"):
            ProcessRewardModel(5)

    @pytest.mark.parametrize("prm_format", [None, "token_classification", "qwen"])
    def test_a_name_that_leads_nowhere_is_refused(self, prm_format):
        with pytest.raises(ValueError, match="`model` is 'no/prm', which is neither a folder with a model nor"):
            ProcessRewardModel("no/prm", prm_format=prm_format)

    @pytest.mark.parametrize("model", ["/no/such/folder", "no such name!"])
    def test_a_path_that_does_not_exist_is_refused(self, model):
        with pytest.raises(ValueError, match="which is neither a folder with a model nor one that can be reached"):
            ProcessRewardModel(model)

    def test_what_has_no_trained_head_is_refused(self, tmp_path, model, tokenizer):
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="which has no trained head"):
            ProcessRewardModel(str(tmp_path), prm_format="token_classification")
        prm = ProcessRewardModel(model, tokenizer=tokenizer, prm_format="token_classification")
        with pytest.raises(ValueError, match="`model` has 300 outputs a token, but this format needs the two classes"):
            prm.score(["q"], [["a"]])

    @pytest.mark.parametrize(("prompts", "steps"), [(["q"], ["abc"]), ("hello", [["a"]] * 5), (["q"], [["a"], ["b"]])])
    def test_steps_that_are_no_lists_of_texts_are_refused(self, prm, prompts, steps):
        with pytest.raises(ValueError, match="give one list of step texts a prompt"):
            prm.score(prompts, steps)

    def test_a_model_of_no_folder_needs_its_tokenizer(self, tokenizer):
        with pytest.raises(ValueError, match="`tokenizer` is missing, but `model` was not loaded"):
            ProcessRewardModel(tiny_prm(tokenizer), prm_format="token_classification")

    def test_a_folder_that_is_no_prm_is_refused(self, tmp_path, model, tokenizer):
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"\(LlamaForCausalLM\), which is not recognized as a process reward"):
            ProcessRewardModel(str(tmp_path))
