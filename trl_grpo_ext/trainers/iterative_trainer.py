import json
import random
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import logging
from accelerate.utils import broadcast_object_list, gather, gather_object, is_peft_model
from transformers import PreTrainedModel, TrainerCallback

from ..batching import batched
from ..iterative.outcome_reward_model import OutcomeRewardModel
from ..iterative.quality import unexplained_reward
from ..iterative.reference import (
    REFERENCE_ADAPTER,
    add_reference_adapter,
    load_reference,
    reference_parameters,
    save_reference,
    update_reference,
)
from ..iterative.replay import is_held_out, mix_with_replay
from ..iterative.reward_update import UPDATES, RewardUpdate, own_randomness
from ..iterative.rollouts import Rollout, RolloutStore
from ..iterative.shared_base import REWARD_ADAPTER, SharedBaseScorer
from ..prm.formats import TokenClassificationFormat
from ..prm.labelling import Solution, StepLabeller
from ..prm.process_reward_model import ProcessRewardModel
from ..rewards.answer import answer_reward, completion_text
from ..steps import Steps
from .grpo_trainer import GRPOExtTrainer
from .iterative_config import IterativeGRPOConfig
from .step_scoring import StepRewardFunc, as_list, checked_scores


logger = logging.get_logger(__name__)
RewardModel = OutcomeRewardModel | ProcessRewardModel
STATE_FOLDER = "iteration"  # in a checkpoint


class IterativeGRPOTrainer(GRPOExtTrainer):
    r"""
    Algorithm 1 of DeepSeekMath (arXiv:2402.03300) whole: iterative GRPO, in one call of `train`.

    Each iteration takes the current policy as its reference, trains for `steps_per_rl_iteration` steps with the
    current reward model, then trains the reward model further on what the policy sampled meanwhile, mixed with a share
    of history. There is one optimizer, one schedule and one series of checkpoints;
    `train(resume_from_checkpoint=True)` goes on from the last complete one.

    Outputs are verified by rule. Of the outputs of one question, right and wrong ones make pairs for an outcome reward
    model; a question whose outputs are all right, all wrong or beyond the rule teaches it nothing. A process reward
    model is trained on step labels, those of `step_verifier` or made by sampling continuations (Math-Shepherd).

    Example:

    ```python
    trainer = IterativeGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        args=IterativeGRPOConfig(num_rl_iterations=2, steps_per_rl_iteration=100, beta=0.04),
        train_dataset=dataset,  # columns `prompt` and `solution`
        reward_model="my-org/my-reward-model",
    )
    trainer.train()
    ```

    Args:
        model, reward_funcs, args, *trl_args, **trl_kwargs:
            Those of [`GRPOExtTrainer`]. The reward model is the first reward function (or step reward function), those
            given here are added to it.
        reward_model (`str`, `Path`, [`~transformers.PreTrainedModel`], [`OutcomeRewardModel`] or
            [`ProcessRewardModel`]):
            A name or model is taken for a process reward model with supervision="process", else for an outcome reward
            model; one that is named is loaded in float32 if it is to be trained. Pass [`OutcomeRewardModel`] or
            [`ProcessRewardModel`] for their own options; with adapters ([`~peft.PeftModel`]) only these are trained.
        verifier (`Callable`, *optional*, defaults to [`~trl_grpo_ext.rewards.answer_reward`]):
            A reward function that tells by rule whether an output is right (1), wrong (0), or `None`. `None` verifies
            nothing.
        step_verifier (`Callable`, *optional*):
            A step reward function that labels steps by rule, in 0 to 1, for `reward_update="process"`. Without it
            steps are labelled by sampling, which needs the column `solution`.

    Raises:
        `ValueError`: if there is no reward model, or it is of another kind than `reward_update`; in the first batch,
            if what is to be verified lacks its column.
        `TypeError`: if `args` is no [`IterativeGRPOConfig`].
    """

    _tag_names = ["trl", "grpo", "trl_grpo_ext", "iterative-grpo"]

    args: IterativeGRPOConfig
    reward_model: RewardModel | None = None
    reward_update: RewardUpdate | None = None
    step_verifier: StepRewardFunc | None = None
    _pending: list[Rollout] = []
    _mean_rewards: tuple[float, float] | None = None  # of right and of wrong outputs, at an iteration's start

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: IterativeGRPOConfig | None = None,
        *trl_args,
        reward_model: str | Path | PreTrainedModel | RewardModel | None = None,
        verifier: Callable[..., list[float | None]] | None = answer_reward,
        step_verifier: StepRewardFunc | None = None,
        step_reward_funcs: Any = None,
        **trl_kwargs,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = IterativeGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, IterativeGRPOConfig):
            raise TypeError(f"`args` is a {type(args).__name__}, but must be an IterativeGRPOConfig.")
        self.reward_model = as_reward_model(reward_model, args)
        if isinstance(self.reward_model, ProcessRewardModel):
            step_reward_funcs = [self.reward_model, *as_list(step_reward_funcs)]
        elif self.reward_model is not None:
            reward_funcs = [self.reward_model, *as_list(reward_funcs)]
        self.verifier = verifier
        self.step_verifier = step_verifier
        super().__init__(model, reward_funcs, args, *trl_args, step_reward_funcs=step_reward_funcs, **trl_kwargs)
        if args.shared_base and self.reward_model is not None:
            self._share_base(self.reward_model)
        elif isinstance(self.reward_model, OutcomeRewardModel):
            self.reward_model.move_to(self.accelerator.device)
        if args.reward_update != "none":
            self._check_can_update(trl_kwargs)
            self.reward_update = make_update(self.reward_model, args)
        if self.beta != 0 and args.reference_update != "none" and is_peft_model(self.model):
            add_reference_adapter(self.model)
        folder = args.rollout_dir or Path(args.output_dir, "_rollouts")
        self.rollouts = RolloutStore(folder, args.rollout_capacity)
        self.add_callback(IterationCallback(self))

    def _check_can_update(self, trl_kwargs: dict[str, Any]) -> None:
        update = f"`reward_update` is {self.args.reward_update!r}, but"
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"{update} a reward model is not trained under FSDP or DeepSpeed; use DDP (with adapters, if memory "
                "is short), or reward_update='none'."
            )
        if trl_kwargs.get("tools") or trl_kwargs.get("environment_factory"):
            raise ValueError(
                f"{update} with tools a completion has several messages, which are not kept as rollouts; use "
                "reward_update='none'."
            )
        if self.step_verifier is not None and self.args.reward_update != "process":
            raise ValueError(f"{update} `step_verifier` is for 'process' alone; leave it out, or change either.")
        if self.verifier is None and self.args.reward_update == "outcome":
            raise ValueError(
                f"{update} without `verifier` there are no right and wrong outputs to pair; pass one, or use another "
                "`reward_update`."
            )

    def _share_base(self, reward_model: RewardModel) -> None:
        if not is_peft_model(self.model):
            raise ValueError(
                "`shared_base` is True, but the policy has no adapter of its own; pass a `peft_config`, or use "
                "shared_base=False."
            )
        reward_model.model.attach(self.model)

    @property
    def rl_iteration(self) -> int:
        """The current outer iteration, from 0 on."""
        return self.state.global_step // self.args.steps_per_rl_iteration

    # Algorithm 1

    def start_training(self) -> None:
        """Called when training starts: at the first step, the reference is the policy as it is."""
        if self.accelerator.is_main_process:
            if self.state.global_step > 0:
                self.rollouts.drop_from(self.state.global_step)
            elif earlier := self.rollouts.set_aside():
                logger.warning(f"The rollouts of an earlier run were renamed to '{earlier}'.")
        self.accelerator.wait_for_everyone()
        if self.state.global_step == 0:
            self._move_reference(share=1.0)

    def finish_iteration(self) -> None:
        """Called after the last step of an iteration: update the reward model, then the next reference."""
        iteration = self.rl_iteration - 1
        if self.reward_update is not None:
            self._update_reward_model(self.reward_update, iteration)
        if self.args.reference_update != "none":
            is_reset = self.args.reference_update == "reset"
            self._move_reference(share=1.0 if is_reset else self.args.ref_model_mixup_alpha)
        self.drop_buffered_completions()  # they have rewards of the old reward model
        self._mean_rewards = None

    def _move_reference(self, share: float) -> None:
        if self._reference_parameters:
            update_reference(self.accelerator.unwrap_model(self.model), self._unwrapped_reference, share)

    @property
    def _unwrapped_reference(self) -> Any:
        return None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)

    @property
    def _reference_parameters(self) -> dict[str, torch.nn.Parameter]:
        return reference_parameters(self.accelerator.unwrap_model(self.model), self._unwrapped_reference)

    # Rollouts

    def before_rewards(self, inputs, prompts, completions, completion_ids) -> None:
        super().before_rewards(inputs, prompts, completions, completion_ids)
        columns = self.reward_kwargs(inputs)
        verified = self._verify(prompts, completions, completion_ids, columns)
        self._verified = gather(torch.tensor([nan_if_none(v) for v in verified], device=self.accelerator.device))
        if not self._verified.isnan().all():
            self.log_metric("verified_accuracy", self._verified.nanmean().item())
        if self.mode == "train" and self.reward_update is not None:
            self._pending = self._make_rollouts(prompts, completions, completion_ids, verified, columns)

    def _make_rollouts(self, prompts, completions, completion_ids, verified, columns) -> list[Rollout]:
        """Rollouts of the local completions, without what is known only once they have rewards."""
        steps = self._steps if self.step_scorer is not None else [Steps([], [])] * len(prompts)
        labels: Sequence[list[float | None]] = [[]] * len(prompts)
        if self.step_verifier is not None:
            texts = [list(completion.texts) for completion in steps]
            labels = checked_scores(
                "step_verifier",
                self.step_verifier(
                    prompts=prompts,
                    completions=completions,
                    steps=texts,
                    completion_ids=completion_ids,
                    step_ends=[list(completion.ends) for completion in steps],
                    **columns,
                ),
                steps,
            )
        labels_by_sampling = self.args.reward_update == "process" and self.step_verifier is None
        if labels_by_sampling and "solution" not in columns:
            raise ValueError(
                "`step_verifier` is missing, and steps cannot be labelled by sampling as the data set has no column "
                "'solution'; add the column, or pass a step verifier."
            )
        solutions = columns.get("solution", [None] * len(prompts))
        return [
            Rollout(
                prompt=prompt,
                completion=completion_text(completion),
                prompt_ids=[],
                completion_ids=list(ids),
                steps=list(cut.texts),
                step_ends=list(cut.ends),
                step_rewards=[],
                step_labels=label,
                reward=None,
                verified=verdict,
                solution=None if solution is None else str(solution),
                iteration=self.rl_iteration,
                policy_step=self.state.global_step,
            )
            for prompt, completion, ids, cut, label, verdict, solution in zip(
                prompts, completions, completion_ids, steps, labels, verified, solutions, strict=True
            )
        ]

    def batch_advantages(self, batch: dict[str, Any]) -> torch.Tensor:
        advantages = super().batch_advantages(batch)
        if self.mode == "train" and self.reward_model is not None:
            self._log_unexplained_reward()
        if self._pending:
            sampled = gather_object(self._with_rewards(self._pending, batch))
            if self.accelerator.is_main_process:
                self.rollouts.add(sampled, self.state.global_step)
            self._pending = []
        return advantages

    def _with_rewards(self, rollouts: list[Rollout], batch: dict[str, Any]) -> list[Rollout]:
        rows = self.local_rows(len(rollouts))
        rewards = self.weighted_rewards()[rows].tolist()
        step_rewards = self._step_rewards[rows].tolist() if self.step_scorer is not None else [[]] * len(rewards)
        prompts = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        prompt_ids = [ids[mask.bool()].tolist() for ids, mask in prompts]
        return [
            replace(
                rollout,
                prompt_ids=ids,
                reward=none_if_nan(reward),
                step_rewards=[none_if_nan(value) for value in of_steps[: len(rollout.steps)]],
            )
            for rollout, ids, reward, of_steps in zip(rollouts, prompt_ids, rewards, step_rewards, strict=True)
        ]

    def _verify(self, prompts, completions, completion_ids, columns) -> list[float | None]:
        if self.verifier is None:
            return [None] * len(prompts)
        try:
            verdicts = self.verifier(
                prompts=prompts, completions=completions, completion_ids=completion_ids, **columns
            )
        except TypeError as error:
            if "required" not in str(error):
                raise
            raise ValueError(
                f"`verifier` needs what the data set does not have ({error}); add the column, or pass another "
                "verifier or verifier=None."
            ) from error
        if not isinstance(verdicts, list) or len(verdicts) != len(prompts) or not set(verdicts) <= {0, 1, None}:
            raise ValueError(
                f"`verifier` returned {verdicts!r} for {len(prompts)} completions; it must return a list of 1 "
                "(right), 0 (wrong) or None, one for each."
            )
        return [None if verdict is None else float(verdict) for verdict in verdicts]

    def _log_unexplained_reward(self) -> None:
        """Hacking of a reward model shows as reward that verified accuracy does not explain."""
        rewards = self._reward_model_rewards()
        known = ~(self._verified.isnan() | rewards.isnan())
        verified, rewards = self._verified[known], rewards[known]
        right, wrong = rewards[verified == 1], rewards[verified == 0]
        if self._mean_rewards is None and len(right) and len(wrong):
            self._mean_rewards = right.mean().item(), wrong.mean().item()
        if self._mean_rewards is not None and len(verified):
            gap = unexplained_reward(rewards.tolist(), verified.tolist(), *self._mean_rewards)
            self.log_metric("reward_model/unexplained_reward", gap)

    def _reward_model_rewards(self) -> torch.Tensor:
        """One number of the reward model for each completion of the generation batch, of all processes."""
        if isinstance(self.reward_model, ProcessRewardModel):
            return self._step_rewards.nanmean(-1)
        return self._rewards_per_func[:, 0]

    # Reward model

    def _update_reward_model(self, update: RewardUpdate, iteration: int) -> None:
        if self.args.reward_update == "process" and self.step_verifier is None:
            self._label_by_sampling(iteration)
        examples, held_out, counts = self._from_main_process(lambda: self._make_examples(update, iteration))
        for name, value in counts.items():
            self.log_metric(f"reward_model/{name}", value)
        before = update.quality(held_out)
        if examples:
            update.train(examples, self._update_options(iteration))
        else:
            logger.warning(
                f"The reward model was not updated after iteration {iteration}: no question has right and wrong "
                "outputs, or no step has a label."
            )
        after = update.quality(held_out) if examples else before
        for name, value in after.items():
            self.log_metric(f"reward_model/{name}", value)
            self.log_metric(f"reward_model/before_update/{name}", before[name])

    def _make_examples(self, update: RewardUpdate, iteration: int) -> tuple[list, list[Rollout], dict[str, float]]:
        rng = random.Random(f"{self.args.seed} {iteration}")
        share = self.args.reward_eval_share
        rollouts = self.rollouts.load()
        taught = [rollout for rollout in rollouts if not is_held_out(rollout.prompt, share)]
        new = update.examples([rollout for rollout in taught if rollout.iteration == iteration], rng)
        history = update.examples([rollout for rollout in taught if rollout.iteration < iteration], rng)
        examples = mix_with_replay(new, history, self.args.replay_ratio, rng)
        held_out = [r for r in rollouts if r.iteration == iteration and is_held_out(r.prompt, share)]
        counts = {
            "num_examples": float(len(examples)),
            "replay_share": (len(examples) - len(new)) / max(len(examples), 1),
        }
        return examples, held_out, counts

    def _update_options(self, iteration: int) -> dict[str, Any]:
        return {
            "output_dir": self.args.output_dir,
            "num_train_epochs": self.args.reward_model_epochs,
            "per_device_train_batch_size": self.args.reward_model_batch_size,
            "seed": self.args.seed + iteration,
            "bf16": self.args.bf16,
            "fp16": self.args.fp16,
            "use_cpu": self.args.use_cpu,
            "max_grad_norm": self.args.max_grad_norm,
            "dataloader_pin_memory": self.args.dataloader_pin_memory,
            # the accelerator is the policy's, which must not be reset
            "accelerator_config": {"use_configured_state": True},
        }

    def _label_by_sampling(self, iteration: int) -> None:
        """Label steps of an iteration's completions, file by file: what a kill leaves finished stays."""
        labeller = StepLabeller(
            self._sample_together, self.text_tokenizer, self.args.label_continuations, self.args.label_mode
        )
        first_step = iteration * self.args.steps_per_rl_iteration
        files = self._from_main_process(lambda: self.rollouts.files(since=first_step))
        limit = -(-self.args.label_completions // max(len(files), 1))
        for part, file in enumerate(files):
            rollouts: list[Rollout] = self._from_main_process(partial(self.rollouts.read, file))
            if any(rollout.step_labels for rollout in rollouts):
                continue
            seed = f"{self.args.seed} {iteration} {part}"
            chosen = choose(rollouts, limit, seed)
            with own_randomness():
                torch.manual_seed(random.Random(f"{seed} {self.accelerator.process_index}").getrandbits(32))
                labels = labeller([to_solution(rollout) for rollout in chosen.values()])
            labelled = dict(zip(chosen, labels, strict=True))
            if self.accelerator.is_main_process:
                rows = [replace(r, step_labels=labelled.get(index, [])) for index, r in enumerate(rollouts)]
                self.rollouts.write(file, rows)
        self.accelerator.wait_for_everyone()

    def _sample_together(self, prefixes: list[list[int]]) -> list[list[int]]:
        """Continue prefixes that all processes have, each process its share of them."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-len(prefixes) // world)
        mine = prefixes[rank * share : (rank + 1) * share]
        # Generation may be collective, so that every process makes the same number of calls.
        filled = mine + [prefixes[0]] * (share - len(mine))
        size = self.args.per_device_train_batch_size * self.args.steps_per_generation
        written = list(chain.from_iterable(map(self.sample_continuations, batched(filled, size))))
        return gather_object(written[: len(mine)])

    def _from_main_process(self, make: Callable[[], Any]) -> Any:
        """What the main process makes (it has the rollouts), on all processes."""
        return broadcast_object_list([make() if self.accelerator.is_main_process else None])[0]

    # State

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            for adapter in (REFERENCE_ADAPTER, REWARD_ADAPTER):  # PEFT saves all adapters
                shutil.rmtree(folder / adapter, ignore_errors=True)
            is_checkpoint = _internal_call and folder != Path(self.args.output_dir)  # which has it with its optimizer
            if self.reward_update is not None and not is_checkpoint:
                self.reward_update.save_model(folder / "reward_model")

    def save_checkpoint_state(self, checkpoint: Path) -> None:
        super().save_checkpoint_state(checkpoint)
        folder = checkpoint / STATE_FOLDER
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            steps = self.args.steps_per_rl_iteration
            state = {"mean_rewards": self._mean_rewards, "steps_per_rl_iteration": steps}
            (folder / "state.json").write_text(json.dumps(state))
            if self.reward_update is not None:
                self.reward_update.save(folder / "reward_model")
        save_reference(self._reference_parameters, folder / "reference.safetensors", self.args.should_save)

    def load_checkpoint_state(self, checkpoint: Path) -> None:
        super().load_checkpoint_state(checkpoint)
        folder = checkpoint / STATE_FOLDER
        needed = folder / "reward_model" if self.reward_update is not None else folder
        if not needed.exists():
            raise ValueError(
                f"`resume_from_checkpoint` is '{checkpoint}', which lacks '{needed.relative_to(checkpoint)}'; name a "
                f"checkpoint of IterativeGRPOTrainer with reward_update={self.args.reward_update!r}."
            )
        state = json.loads((folder / "state.json").read_text())
        if state.get("steps_per_rl_iteration", self.args.steps_per_rl_iteration) != self.args.steps_per_rl_iteration:
            raise ValueError(
                f"`steps_per_rl_iteration` is {self.args.steps_per_rl_iteration}, but '{checkpoint}' is of a run with "
                f"{state['steps_per_rl_iteration']}, whose iterations end elsewhere; set it to that."
            )
        self._mean_rewards = state["mean_rewards"]
        if self.reward_update is not None:
            self.reward_update.load(folder / "reward_model")
        load_reference(self._reference_parameters, folder / "reference.safetensors")


class IterationCallback(TrainerCallback):
    """Tells the trainer when training starts and when an iteration ends."""

    def __init__(self, trainer: IterativeGRPOTrainer):
        self._trainer = weakref.proxy(trainer)  # which holds this callback

    def on_train_begin(self, args, state, control, **kwargs):
        self._trainer.start_training()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.steps_per_rl_iteration == 0:
            self._trainer.finish_iteration()

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._trainer.rollouts.prune()


def as_reward_model(model: Any, args: IterativeGRPOConfig) -> RewardModel | None:
    """The reward model, loaded and of the kind that it is trained as."""
    if model is None:
        if args.reward_update == "none" and not args.shared_base:
            return None
        raise ValueError(
            f"`reward_model` is missing, but `reward_update` is {args.reward_update!r}; pass a reward model, or use "
            "reward_update='none'."
        )
    if args.shared_base:
        if not isinstance(model, (str, Path)):
            raise ValueError(
                f"`reward_model` is a {type(model).__name__}, but `shared_base` puts it on the policy's base model; "
                "pass the folder of its adapter."
            )
        model = SharedBaseScorer(str(model))
    if not isinstance(model, (OutcomeRewardModel, ProcessRewardModel)):
        kind = ProcessRewardModel if args.supervision == "process" else OutcomeRewardModel
        # Small steps are lost in weights of 16 bits
        is_trained = args.reward_update != "none" and isinstance(model, (str, Path))
        model = kind(model, model_init_kwargs={"dtype": "float32"} if is_trained else None)
    if args.reward_update != "none" and not isinstance(model, UPDATES[args.reward_update][0]):
        raise ValueError(
            f"`reward_update` is {args.reward_update!r}, but `reward_model` is of class {type(model).__name__}; pass "
            f"one of class {UPDATES[args.reward_update][0].__name__}, or change `reward_update`."
        )
    is_process = args.reward_update == "process" and isinstance(model, ProcessRewardModel)
    if is_process and (not isinstance(model.format, TokenClassificationFormat) or model.format.signed):
        raise ValueError(
            f"`reward_model` is called as {type(model.format).__name__}, but only token classifiers are trained "
            "along, with scores in 0 to 1; pass one of PRMTrainer's, or use reward_update='none'."
        )
    return model


def make_update(model: RewardModel | None, args: IterativeGRPOConfig) -> RewardUpdate:
    return UPDATES[args.reward_update][1](model, args.reward_model_learning_rate)


def choose(rollouts: list[Rollout], count: int, seed: str) -> dict[int, Rollout]:
    """Some rollouts of several steps, by their index."""
    indices = [index for index, rollout in enumerate(rollouts) if rollout.steps and rollout.solution is not None]
    chosen = sorted(random.Random(seed).sample(indices, min(count, len(indices))))
    return {index: rollouts[index] for index in chosen}


def to_solution(rollout: Rollout) -> Solution:
    steps = Steps(rollout.steps, rollout.step_ends)
    return Solution(rollout.prompt_ids, rollout.completion_ids, steps, rollout.solution or "")


def none_if_nan(value: float) -> float | None:
    return None if value != value else value


def nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value
