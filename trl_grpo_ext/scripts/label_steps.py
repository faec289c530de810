r"""
Label the steps of a policy's own solutions by sampling from them (Math-Shepherd, arXiv:2312.08935).

Without arguments it labels solutions of the embedded policy, in about a minute on two CPU cores:

    python -m trl_grpo_ext.scripts.label_steps

What is labelled is written as it goes; the same command again goes on where it was stopped.
"""

from dataclasses import asdict, dataclass, field

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, TrlParser, maybe_apply_chat_template

from ..choices import check_at_least_one
from ..data import get_split, load_prompt_dataset, to_prompts_and_solutions
from ..files import PartStore
from ..generation import BACKENDS, Sampler, load_sampler, load_tokenizer
from ..prm.labelling import MODES, Solution, StepLabeller
from ..steps import SeparatorSplitter, TextSplitter, cut_into_steps, from_command_line
from ..tasks import EMBEDDED_POLICY, make_dataset
from .deepseekmath import share_of_cores


@dataclass
class LabelStepsArguments:
    """
    Arguments of the labelling.

    Args:
        dataset_name (`str`, *optional*):
            Prompt/answer data set: a Hub id, or a local folder or file. By default the embedded word problems.
        dataset_config (`str`, *optional*):
            Configuration of a Hub data set.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split whose questions are asked.
        num_problems (`int`, *optional*, defaults to `160`):
            Number of questions.
        num_solutions (`int`, *optional*, defaults to `4`):
            Solutions sampled for each.
        num_continuations (`int`, *optional*, defaults to `8`):
            Continuations sampled from each prefix.
        mode (`str`, *optional*, defaults to `"soft"`):
            `"soft"`, `"hard"` or `"first_error"`, see [`~trl_grpo_ext.prm.labelling.StepLabeller`].
        step_separator (`str`, *optional*, defaults to `"\\n"`):
            What ends a step.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        max_new_tokens (`int`, *optional*, defaults to `64`):
            Longest solution and longest continuation, in tokens.
        batch_size (`int`, *optional*, defaults to `512`):
            Sequences sampled at once.
        backend (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"`, or `"vllm"`, on all of the machine's GPUs.
        problems_per_part (`int`, *optional*, defaults to `32`):
            Questions whose labels are written to disk together.
        seed (`int`, *optional*, defaults to `42`):
            Seed of questions and sampling.
        output_dir (`str`, *optional*, defaults to `"step-labels"`):
            Folder of the labels.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Prompt/answer data set."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split whose questions are asked."})
    num_problems: int = field(default=160, metadata={"help": "Number of questions."})
    num_solutions: int = field(default=4, metadata={"help": "Solutions sampled for each question."})
    num_continuations: int = field(default=8, metadata={"help": "Continuations sampled from each prefix."})
    mode: str = field(default="soft", metadata={"help": "Kind of labels.", "choices": list(MODES)})
    step_separator: str = field(default="\n", metadata={"help": "What ends a step."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest solution and continuation, in tokens."})
    batch_size: int = field(default=512, metadata={"help": "Sequences sampled at once."})
    backend: str = field(default="transformers", metadata={"help": "What samples.", "choices": list(BACKENDS)})
    problems_per_part: int = field(default=32, metadata={"help": "Questions written to disk together."})
    seed: int = field(default=42, metadata={"help": "Seed of questions and sampling."})
    output_dir: str = field(default="step-labels", metadata={"help": "Folder of the labels."})

    def __post_init__(self):
        check_at_least_one(
            num_problems=self.num_problems,
            num_solutions=self.num_solutions,
            num_continuations=self.num_continuations,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            problems_per_part=self.problems_per_part,
        )
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` is {self.temperature}, but must be above 0, as continuations are sampled."
            )
        self.step_separator = from_command_line(self.step_separator)


def main(script_args: LabelStepsArguments, model_args: ModelConfig) -> None:
    torch.set_num_threads(share_of_cores())
    name = model_args.model_name_or_path or str(EMBEDDED_POLICY)
    store = PartStore(script_args.output_dir, {**asdict(script_args), "model_name_or_path": name, "output_dir": None})
    problems = load_problems(script_args)
    tokenizer = load_tokenizer(name, revision=model_args.model_revision)
    sampler = load_sampler(
        name,
        tokenizer,
        model_args,
        script_args.backend,
        max_new_tokens=script_args.max_new_tokens,
        batch_size=script_args.batch_size,
        seed=script_args.seed,
    )
    sample = sampler(script_args.temperature)
    labeller = StepLabeller(sample, tokenizer, script_args.num_continuations, script_args.mode)
    splitter = SeparatorSplitter(script_args.step_separator)
    size = script_args.problems_per_part
    for part in track(range(-(-len(problems) // size)), "Labelling"):
        if store.has(part):
            continue
        set_seed(script_args.seed + part)  # so that a part is the same whether or not those before it were redone
        rows = problems.select(range(part * size, min((part + 1) * size, len(problems)))).to_list()
        store.write(part, label_part(rows, script_args.num_solutions, tokenizer, sample, labeller, splitter))
    report(store, labeller)


def load_problems(script_args: LabelStepsArguments) -> Dataset:
    if script_args.dataset_name is None:
        return make_dataset(script_args.num_problems, seed=script_args.seed)
    dataset = load_prompt_dataset(script_args.dataset_name, script_args.dataset_config)
    problems = to_prompts_and_solutions(get_split(dataset, script_args.dataset_split, "dataset_split"))
    return problems.shuffle(seed=script_args.seed).select(range(min(script_args.num_problems, len(problems))))


def label_part(
    rows: list[dict],
    num_solutions: int,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sampler,
    labeller: StepLabeller,
    splitter: TextSplitter,
) -> list[dict]:
    """Sample solutions of some problems, and label their steps."""
    problems = [row for row in rows for _ in range(num_solutions)]
    prompts = [maybe_apply_chat_template({"prompt": row["prompt"]}, tokenizer)["prompt"] for row in problems]
    prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    special = set(tokenizer.all_special_ids)
    solutions = []
    for row, ids, written in zip(problems, prompt_ids, sample(prompt_ids), strict=True):
        # as written, up to the end of the answer
        end = next((index for index, token in enumerate(written) if token in special), len(written))
        written = written[: max(end, 1)]
        solutions.append(Solution(ids, written, cut_into_steps(written, tokenizer, splitter), row["solution"]))
    return [
        {
            "prompt": row["prompt"],
            "completions": solution.steps.texts,
            "labels": labels,
            "solution": row["solution"],
        }
        for row, solution, labels in zip(problems, solutions, labeller(solutions), strict=True)
    ]


def report(store: PartStore, labeller: StepLabeller) -> None:
    labels = [label for row in store.load()["labels"] for label in row if label is not None]
    Console().print(
        f"{len(labels)} steps labelled, {labeller.num_sampled} continuations sampled now; mean label "
        f"{sum(labels) / max(len(labels), 1):.2f}. They are in {store.folder}/"
    )


def make_parser() -> TrlParser:
    return TrlParser((LabelStepsArguments, ModelConfig))


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    main(*make_parser().parse_args_and_config(argv))


if __name__ == "__main__":
    run()
