import copy

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import TrainerCallback

from trl_grpo_ext.objective import consistent_completions

from ..objective.reference import numpy_outcome_advantages, numpy_process_advantages
from ..tiny import prompt_dataset, save_tiny_model
from .helpers import (
    cut_every_four,
    generation_batch,
    length_reward,
    make_trainer,
    process_options,
    step_length_reward,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class TestProcessSupervision:
    def test_token_advantages_are_those_of_the_formula(self, tmp_path, model, tokenizer):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options())
        batch = generation_batch(trainer)
        lengths = batch["completion_mask"].sum(1).tolist()
        texts = [
            tokenizer.decode(ids[:length], skip_special_tokens=True)
            for ids, length in zip(batch["completion_ids"].tolist(), lengths, strict=True)
        ]
        steps = [completion.texts for completion in trainer._steps]
        assert ["".join(completion) for completion in steps] == [text.rstrip("\ufffd") for text in texts]
        expected = numpy_process_advantages(
            step_length_reward(steps),
            [completion.ends for completion in trainer._steps],
            num_generations=4,
            length=batch["completion_ids"].shape[1],
        )
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(batch["advantages"].numpy(), expected, rtol=1e-4, atol=1e-4)

    def test_gradient_is_advantages_times_that_of_the_log_probabilities(self, tmp_path, model, tokenizer):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(loss_type="grpo"))
        batch = generation_batch(trainer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss(trainer.model, batch).backward()
        ours = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

        trainer.model.zero_grad()
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        logps = logps[:, -batch["completion_ids"].shape[1] :]
        mask = batch["completion_mask"]
        # Eq. 3 on-policy: the ratio is 1, so its gradient is that of the log probability
        objective = ((batch["advantages"] * logps * mask).sum(1) / mask.sum(1)).mean()
        (-objective).backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
        assert expected.norm() > 1e-3
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"])
    @pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
    def test_with_one_step_it_trains_as_outcome_supervision(
        self, tmp_path, tokenizer, model_path, loss_type, scale_rewards
    ):
        options = {"loss_type": loss_type, "scale_rewards": scale_rewards, "beta": 0.04, "optim": "sgd"}
        outcome = make_trainer(tmp_path / "outcome", model_path, prompt_dataset(), tokenizer, **options)
        outcome.train()
        process = make_trainer(
            tmp_path / "process",
            model_path,
            prompt_dataset(),
            tokenizer,
            supervision="process",
            step_splitter=lambda text: [text],
            step_reward_funcs=lambda completion_ids, **kwargs: [[r] for r in length_reward(completion_ids)],
            **options,
        )
        process.train()
        for (name, ours), theirs in zip(
            process.model.state_dict().items(), outcome.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)

    def test_scores_of_several_functions_are_weighted_and_summed_without_none(self, tmp_path, model, tokenizer):
        def second(steps, **kwargs):
            return [[None if index == 0 else 1.0 for index, _ in enumerate(completion)] for completion in steps]

        trainer = make_trainer(
            tmp_path,
            model,
            prompt_dataset(),
            tokenizer,
            **process_options(step_reward_funcs=[step_length_reward, second], step_reward_weights=[2.0, 0.5]),
        )
        generation_batch(trainer)
        steps = [completion.texts for completion in trainer._steps]
        for row, completion in zip(trainer._step_rewards.tolist(), steps, strict=True):
            firsts = step_length_reward([completion])[0]
            expected = [2.0 * firsts[0]] + [2.0 * first + 0.5 for first in firsts[1:]]
            assert row[: len(completion)] == pytest.approx(expected)
            assert np.isnan(row[len(completion) :]).all()

    def test_functions_of_one_name_have_metrics_of_their_own(self, tmp_path, model, tokenizer):
        funcs = [lambda steps, c=c, **kwargs: [[c * len(step) for step in row] for row in steps] for c in (1.0, 2.0)]
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=funcs, max_steps=1)
        )
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["step_rewards/<lambda>_2/mean"] == pytest.approx(2 * log["step_rewards/<lambda>/mean"])

    def test_step_reward_functions_receive_what_reward_functions_do(self, tmp_path, model, tokenizer):
        seen = {}

        def spy(prompts, completions, steps, completion_ids, solution, trainer_state, log_extra, log_metric, **kwargs):
            seen.update(
                prompts=prompts, completions=completions, ids=completion_ids, solution=solution, state=trainer_state
            )
            log_metric("spied", 3.0)
            log_extra("first_step", [completion[0] for completion in steps])
            return step_length_reward(steps)

        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=spy, max_steps=1)
        )
        trainer.train()
        assert len(seen["prompts"]) == len(seen["completions"]) == len(seen["ids"]) == len(seen["solution"]) == 8
        assert seen["prompts"][0] == f"Count {seen['solution'][0]}:"
        assert seen["state"] is trainer.state
        assert trainer.state.log_history[0]["spied"] == 3.0

    def test_environment_tokens_have_advantage_zero(self, tmp_path, model, tokenizer):
        ids = tokenizer.encode("one two three four five six")
        env_mask = [1, 1, 0, 0] + [1] * (len(ids) - 4)

        def rollout(prompts, trainer):
            return {
                "prompt_ids": [tokenizer.encode(prompt) for prompt in prompts],
                "completion_ids": [ids[: len(ids) - index % 3] for index, _ in enumerate(prompts)],
                "logprobs": None,
                "env_mask": [env_mask[: len(ids) - index % 3] for index, _ in enumerate(prompts)],
            }

        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(rollout_func=rollout))
        advantages = generation_batch(trainer)["advantages"]
        assert not advantages[:, 2:4].any()
        assert advantages[:, :2].any()

    def test_logs_steps_and_step_rewards(self, tmp_path, model, tokenizer):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(max_steps=1))
        trainer.train()
        log = trainer.state.log_history[0]
        counts = [len(completion.ends) for completion in trainer._steps]
        rewards = [score for row in trainer._step_rewards.tolist() for score in row if score == score]
        assert log["steps/mean_count"] == pytest.approx(np.mean(counts))
        assert (log["steps/min_count"], log["steps/max_count"]) == (min(counts), max(counts))
        assert 0 <= log["steps/filler_share"] < 1
        assert log["steps/mean_length"] == pytest.approx(log["completions/mean_length"] / np.mean(counts))
        assert log["step_reward"] == pytest.approx(np.mean(rewards))
        assert log["step_reward_std"] == pytest.approx(np.std(rewards, ddof=1))
        assert log["step_rewards/step_length_reward/mean"] == pytest.approx(np.mean(rewards))
        assert log["step_rewards/step_length_reward/std"] == pytest.approx(np.std(rewards, ddof=1))
        groups = trainer._step_rewards.reshape(2, -1).numpy()
        all_same = [np.nanmax(group) == np.nanmin(group) for group in groups]
        assert log["step_rewards/frac_groups_all_same"] == np.mean(all_same)

    def test_logs_whether_more_steps_are_paid_more(self, tmp_path, model, tokenizer):
        # every step scores 1 in even completions and 0 in odd ones, so that the sum grows with the number of steps
        def by_parity(steps, **kwargs):
            return [[float(index % 2 == 0)] * len(texts) for index, texts in enumerate(steps)]

        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=by_parity)
        )
        batch = generation_batch(trainer)
        counts = [len(completion.ends) for completion in trainer._steps]
        expected = np.corrcoef(counts, batch["advantages"][:, 0].tolist())[0, 1]
        assert trainer._metrics["train"]["steps/count_advantage_correlation"] == [pytest.approx(expected, abs=1e-4)]

    def test_equal_rewards_train_nothing_and_are_counted(self, tmp_path, tokenizer, model_path):
        trainer = make_trainer(
            tmp_path,
            model_path,
            prompt_dataset(),
            tokenizer,
            **process_options(
                step_reward_funcs=lambda steps, **kwargs: [[0.7] * len(completion) for completion in steps],
                max_steps=1,
            ),
        )
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        assert trainer.state.log_history[0]["step_rewards/frac_groups_all_same"] == 1
        assert trainer.state.log_history[0]["grad_norm"] == 0
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, before[name])

    def test_reward_functions_may_be_left_out(self, tmp_path, model, tokenizer):
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(reward_funcs=None, max_steps=1)
        )
        trainer.train()
        means = [np.nanmean(row) for row in trainer._step_rewards.tolist()]
        assert trainer.state.log_history[0]["rewards/mean_step_reward/mean"] == pytest.approx(np.mean(means))

    def test_evaluates_groups_of_one(self, tmp_path, model, tokenizer):
        trainer = make_trainer(
            tmp_path,
            model,
            prompt_dataset(),
            tokenizer,
            **process_options(eval_dataset=prompt_dataset(4), num_generations_eval=1, per_device_eval_batch_size=4),
        )
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == 0
        assert metrics["eval_steps/mean_count"] >= 1

    def test_completions_table_shows_our_advantages(self, tmp_path, model, tokenizer):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options())
        batch = generation_batch(trainer)
        assert list(trainer._logs["advantages"]) == pytest.approx(batch["advantages"][:, 0].tolist())


class TestAdvantageOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"step_credit": "mean_to_go"},
            {"step_credit": "step"},
            {"step_credit": "min"},
            {"step_credit": "softmin"},
            {"step_credit": "delta", "outcome_weight": 1.0},
            {"step_credit": "clip"},
            {"advantage_baseline": "leave_one_out"},
            {"advantage_baseline": "batch", "scale_rewards": "batch"},
            {"advantage_baseline": "none", "scale_rewards": "none"},
            {"outcome_weight": 0.5},
            {"outcome_weight": 0.5, "step_credit": "delta", "advantage_baseline": "leave_one_out"},
        ],
        ids=str,
    )
    def test_process_advantages_are_those_of_the_formula(self, tmp_path, model, tokenizer, options):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(**options))
        batch = generation_batch(trainer)
        mask = batch["completion_mask"]
        rewards = [[score for score in row if score == score] for row in trainer._step_rewards.tolist()]
        ends = [completion.ends for completion in trainer._steps]
        normalization = {
            "baseline": options.get("advantage_baseline", "mean"),
            "scale": options.get("scale_rewards", "group"),
        }
        expected = numpy_process_advantages(
            rewards, ends, 4, mask.shape[1], credit=options.get("step_credit", "sum_to_go"), **normalization
        )
        ids = [row[:length].tolist() for row, length in zip(batch["completion_ids"], mask.sum(1), strict=True)]
        outcome = numpy_outcome_advantages(length_reward(ids), 4, **normalization)
        expected += options.get("outcome_weight", 0.0) * outcome[:, None]
        np.testing.assert_allclose(batch["advantages"].numpy(), expected * mask.numpy(), rtol=1e-3, atol=1e-4)

    def test_process_filter_leaves_out_completions_whose_process_disagrees(self, tmp_path, model, tokenizer):
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, step_reward_funcs=step_length_reward,
            step_splitter=cut_every_four, process_filter_keep=0.5,
        )  # fmt: skip
        batch = generation_batch(trainer)
        lengths = batch["completion_mask"].sum(1)
        ids = [row[:length].tolist() for row, length in zip(batch["completion_ids"], lengths, strict=True)]
        rewards = torch.tensor(length_reward(ids))
        kept = consistent_completions(rewards, trainer._step_rewards.nanmean(1), 4, 0.5)
        assert kept.sum() == 4
        expected = numpy_outcome_advantages(
            [reward if keep else None for reward, keep in zip(rewards.tolist(), kept, strict=True)], 4
        )
        np.testing.assert_allclose(batch["advantages"].numpy(), expected, rtol=1e-3, atol=1e-4)
        assert not batch["advantages"][~kept].any()

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            (process_options(outcome_weight=1.0), "outcome_weight"),
            ({"process_filter_keep": 0.5}, "process_filter_keep"),
        ],
    )
    def test_what_needs_outcome_rewards_refuses_to_be_without(self, tmp_path, model, tokenizer, options, name):
        options = {"step_reward_funcs": step_length_reward, **options, "reward_funcs": None}
        with pytest.raises(ValueError, match=f"`reward_funcs` is missing, but `{name}` is"):
            make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **options)

    def test_process_filter_needs_step_reward_functions(self, tmp_path, model, tokenizer):
        with pytest.raises(ValueError, match="`step_reward_funcs` is missing, but supervision='process' or"):
            make_trainer(tmp_path, model, prompt_dataset(), tokenizer, process_filter_keep=0.5)


class TestOutcomeSupervision:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (
                {"advantage_baseline": "leave_one_out", "scale_rewards": "none"},
                lambda r: (r - r.mean(1, keepdims=True)) * 4 / 3,
            ),
            (
                {"advantage_baseline": "batch", "scale_rewards": "batch"},
                lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4),
            ),
            ({"advantage_baseline": "none", "scale_rewards": "none"}, lambda r: r),
            ({"std_correction": 0}, lambda r: (r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-4)),
            ({"std_eps": 1.0}, lambda r: (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1)),
            ({"zero_advantage_tolerance": 100.0}, lambda r: 0 * r),
        ],
    )
    def test_options_change_the_advantages(self, tmp_path, model, tokenizer, options, expected):
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **options)
        batch = generation_batch(trainer)
        lengths = batch["completion_mask"].sum(1)
        ids = [row[:length].tolist() for row, length in zip(batch["completion_ids"], lengths, strict=True)]
        rewards = np.array(length_reward(ids)).reshape(-1, 4)
        np.testing.assert_allclose(batch["advantages"].numpy(), expected(rewards).flatten(), rtol=1e-4, atol=1e-5)


class TestSecondTraining:
    def test_does_not_reuse_completions_of_an_earlier_call(self, tmp_path, model_path, tokenizer):
        rewarded = []

        def spy(completion_ids, **kwargs):
            rewarded.append(len(completion_ids))
            return length_reward(completion_ids)

        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, reward_funcs=spy, max_steps=1,
            gradient_accumulation_steps=1, steps_per_generation=2,
        )  # fmt: skip
        trainer.train()
        assert len(rewarded) == 1
        trainer.train()  # the second half of the first window's completions is still buffered
        assert len(rewarded) == 2

    @pytest.mark.parametrize("pool_generation_batches", [True, False])
    def test_begins_with_a_whole_step_after_one_that_was_interrupted(
        self, tmp_path, model_path, tokenizer, pool_generation_batches
    ):
        rewarded = []

        def spy(completion_ids, **kwargs):
            rewarded.append(len(completion_ids))
            return length_reward(completion_ids)

        class InterruptsOnce(TrainerCallback):
            has_interrupted = False

            def on_substep_end(self, args, state, control, **kwargs):
                if not self.has_interrupted:
                    self.has_interrupted = True
                    raise KeyboardInterrupt

        trainer = make_trainer(
            tmp_path, model_path, prompt_dataset(), tokenizer, reward_funcs=spy, max_steps=1,
            gradient_accumulation_steps=4, steps_per_generation=2, per_device_train_batch_size=4,
            pool_generation_batches=pool_generation_batches, callbacks=[InterruptsOnce()],
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        rewarded.clear()
        trainer.train()
        assert len(rewarded) == 2


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"supervision": "process"},
                ValueError,
                "`step_reward_funcs` is missing, but supervision='process' or",
            ),
            (
                {"step_reward_funcs": step_length_reward},
                ValueError,
                "`supervision` is 'outcome', which uses no `step_reward_funcs`",
            ),
            ({"step_splitter": cut_every_four}, ValueError, "`supervision` is 'outcome', which uses no"),
            (
                process_options(step_reward_weights=[1.0, 2.0]),
                ValueError,
                "`step_reward_weights` has 2 entries for 1 step reward functions",
            ),
            (
                process_options(step_reward_funcs=5),
                TypeError,
                "`step_reward_funcs` contains 5, which is no function",
            ),
            (
                process_options(step_reward_funcs="no/prm"),
                ValueError,
                "`model` is 'no/prm', which is neither a folder with a model nor",
            ),
        ],
    )
    def test_bad_arguments_are_refused_at_construction(self, tmp_path, model, tokenizer, options, error, message):
        with pytest.raises(error, match=message):
            make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **options)

    def test_an_asynchronous_step_reward_function_is_refused(self, tmp_path, model, tokenizer):
        async def judge(steps, **kwargs):
            return []

        with pytest.raises(TypeError, match="`step_reward_funcs` contains the asynchronous 'judge'"):
            make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=judge))

    def test_a_separator_that_the_tokenizer_cannot_write_is_refused_at_construction(self, tmp_path, model, tokenizer):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\n", " ")
        with pytest.raises(ValueError, match=r"`step_separator` is '\\n', which the tokenizer cannot write"):
            make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_splitter=None))

    def test_a_separator_that_never_occurs_is_refused_before_any_update(self, tmp_path, model, tokenizer):
        trainer = make_trainer(
            tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_separator="§§§", step_splitter=None)
        )
        with pytest.raises(ValueError, match="`step_separator` is '§§§', but it divides none of the 8 completions"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_a_column_with_the_name_of_an_argument_is_refused(self, tmp_path, model, tokenizer):
        dataset = prompt_dataset().add_column("steps", [["no step"]] * 8)
        trainer = make_trainer(tmp_path, model, dataset, tokenizer, **process_options())
        with pytest.raises(ValueError, match="The data set has a column 'steps', which is also"):
            trainer.train()

    @pytest.mark.parametrize(
        ("scores", "error", "message"),
        [
            (
                lambda steps: [["1.0"] * len(row) for row in steps],
                TypeError,
                r"'scores' returned list that holds no lists of numbers",
            ),
            (lambda steps: None, TypeError, r"'scores' returned NoneType that holds no lists of numbers"),
            (lambda steps: [1.0 for _ in steps], TypeError, r"'scores' returned list that holds no lists of numbers"),
            (
                lambda steps: [[float("inf")] * len(row) for row in steps],
                ValueError,
                r"'scores' returned the score inf",
            ),
            (lambda steps: [[1e39] * len(row) for row in steps], ValueError, r"'scores' returned the score 1e\+39"),
            (
                lambda steps: [[None] * len(row) for row in steps],
                ValueError,
                r"`step_reward_funcs` scored none of the steps",
            ),
            (lambda steps: [[1.0]], ValueError, "'scores' returned 1 lists of scores for 8 completions"),
            (
                lambda steps: [[1.0] * (len(row) + 1) for row in steps],
                ValueError,
                r"'scores' returned \d+ scores for completion 0",
            ),
        ],
    )
    def test_scores_that_do_not_fit_are_refused_before_any_update(
        self, tmp_path, model, tokenizer, scores, error, message
    ):
        def func(steps, **kwargs):
            return scores(steps)

        func.__name__ = "scores"
        trainer = make_trainer(tmp_path, model, prompt_dataset(), tokenizer, **process_options(step_reward_funcs=func))
        with pytest.raises(error, match=message):
            trainer.train()
        assert trainer.state.global_step == 0
