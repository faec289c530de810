r"""
Evaluate a policy as DeepSeekMath does (arXiv:2402.03300, 5.2.2 and Fig. 7): greedily, and Maj@K and Pass@K of samples.

Without arguments it evaluates the embedded policy on the embedded word problems:

    accelerate launch -m trl_grpo_ext.scripts.evaluate

A trained model beside the one it was trained from, on GSM8K and MATH:

    accelerate launch -m trl_grpo_ext.scripts.evaluate --benchmarks gsm8k math \
        --model_name_or_path my-trained-model --baseline_name_or_path deepseek-ai/deepseek-math-7b-instruct

What is generated is written as it goes; the same command again goes on where it was stopped.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, TrlParser, maybe_apply_chat_template

from ..batching import batched
from ..benchmarks import BENCHMARKS, Benchmark, summarize
from ..choices import check_at_least_one
from ..data import get_split, load_prompt_dataset, to_prompts_and_solutions, warn_of_unparsed_solutions
from ..files import PartStore, written_whole
from ..generation import BACKENDS, Sampler, load_sampler, load_tokenizer
from ..tasks import EMBEDDED_POLICY, make_dataset
from .deepseekmath import share_of_cores


EMBEDDED = "word_problems"
NOT_IN_COMPLETIONS = ("benchmarks", "baseline_name_or_path", "output_dir", "batch_size")


@dataclass
class EvaluateArguments:
    """
    Arguments of the evaluation.

    Args:
        benchmarks (`list[str]`, *optional*, defaults to `["word_problems"]`):
            `"word_problems"` (embedded), `"gsm8k"`, `"math"`, `"math500"`, `"mgsm_zh"`, `"cmath"`, or local files or
            folders with the columns of one of these.
        baseline_name_or_path (`str`, *optional*):
            Second model, to compare with.
        split (`str`, *optional*, defaults to `"test"`):
            Split of local files and folders.
        instruction (`str`, *optional*):
            Text after each question, on a line of its own. By default the paper's for benchmarks with a name, none for
            others.
        num_problems (`int`, *optional*):
            Problems of each benchmark, its first ones. By default all (128 of the embedded ones).
        num_samples (`int`, *optional*, defaults to `64`):
            Samples a problem, the largest K; the paper's Fig. 7 has 64. `0` evaluates greedily alone.
        temperature (`float`, *optional*, defaults to `0.7`):
            Sampling temperature, the paper's. Greedy decoding has none.
        max_new_tokens (`int`, *optional*, defaults to `1024`):
            Longest completion in tokens, the paper's.
        backend (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"`, or `"vllm"` (one process, all of the machine's GPUs).
        batch_size (`int`, *optional*, defaults to `256`):
            Completions generated at once by a process (`"transformers"` alone).
        problems_per_part (`int`, *optional*, defaults to `32`):
            Problems whose completions are written to disk together.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
        output_dir (`str`, *optional*, defaults to `"evaluation"`):
            Folder of completions, `results.json` and `maj_and_pass.png`.
    """

    benchmarks: list[str] = field(
        default_factory=lambda: [EMBEDDED], metadata={"help": f"{EMBEDDED}, {', '.join(BENCHMARKS)}, or local files."}
    )
    baseline_name_or_path: str | None = field(default=None, metadata={"help": "Second model, to compare with."})
    split: str = field(default="test", metadata={"help": "Split of local files and folders."})
    instruction: str | None = field(default=None, metadata={"help": "Text after each question."})
    num_problems: int | None = field(default=None, metadata={"help": "Problems of each benchmark, its first ones."})
    num_samples: int = field(default=64, metadata={"help": "Samples a problem, the largest K; 0 for greedy alone."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    max_new_tokens: int = field(default=1024, metadata={"help": "Longest completion in tokens."})
    backend: str = field(default="transformers", metadata={"help": "What generates.", "choices": list(BACKENDS)})
    batch_size: int = field(default=256, metadata={"help": "Completions generated at once by a process."})
    problems_per_part: int = field(default=32, metadata={"help": "Problems written to disk together."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    output_dir: str = field(default="evaluation", metadata={"help": "Folder of completions and results."})

    def __post_init__(self):
        check_at_least_one(
            num_problems=self.num_problems,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            problems_per_part=self.problems_per_part,
        )
        if self.num_samples < 0:
            raise ValueError(f"`num_samples` is {self.num_samples}, but must be 0 or more.")
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` is {self.temperature}, but must be above 0; for greedy decoding alone set "
                "`num_samples=0`."
            )
        unknown = [name for name in self.benchmarks if name not in (EMBEDDED, *BENCHMARKS) and not Path(name).exists()]
        if unknown:
            raise ValueError(
                f"`benchmarks` names {unknown[0]!r}, which is neither a file or folder here nor one of {EMBEDDED}, "
                f"{', '.join(BENCHMARKS)}."
            )


# Of each model and benchmark the metrics
Results = dict[str, dict[str, dict[str, Any]]]


def main(script_args: EvaluateArguments, model_args: ModelConfig) -> None:
    state = PartialState(cpu=not torch.accelerator.is_available())
    if state.device.type == "cpu":
        torch.set_num_threads(share_of_cores())
    fields = {"model_name_or_path": model_args.model_name_or_path or str(EMBEDDED_POLICY)}
    if script_args.baseline_name_or_path is not None:
        fields["baseline_name_or_path"] = script_args.baseline_name_or_path
    # All first: the second model may be hours away
    tokenizers = {
        name: load_tokenizer(name, field, revision=model_args.model_revision) for field, name in fields.items()
    }
    results = {
        name: evaluate_model(name, tokenizer, script_args, model_args) for name, tokenizer in tokenizers.items()
    }
    if state.is_main_process:
        report(results, script_args)
    state.destroy_process_group()


def evaluate_model(
    name: str, tokenizer: PreTrainedTokenizerBase, script_args: EvaluateArguments, model_args: ModelConfig
) -> dict[str, dict[str, Any]]:
    """Metrics of a model on each benchmark."""
    state = PartialState()
    loaded = cache(
        partial(
            load_sampler,
            name,
            tokenizer,
            model_args,
            script_args.backend,
            max_new_tokens=script_args.max_new_tokens,
            batch_size=script_args.batch_size,
            seed=script_args.seed,
        )
    )
    metrics = {}
    for benchmark in script_args.benchmarks:
        rows = load_problems(benchmark, script_args).to_list()
        problems = list(batched(rows, script_args.problems_per_part))
        store = make_store(name, benchmark, rows, script_args, model_args)
        missing = broadcast_object_list([[part for part in range(len(problems)) if not store.has(part)]])[0]
        title = f"{Path(name).name} on {Path(benchmark).name}"
        for part in track(missing, title, disable=not state.is_main_process):
            # Other samples in each part and process, the same whether or not earlier parts are done again
            set_seed(script_args.seed + part * state.num_processes + state.process_index)
            completed = complete(problems[part], tokenizer, loaded(), script_args)
            if state.is_main_process:
                store.write(part, completed)
        state.wait_for_everyone()
        metrics[benchmark] = summarize(store.load()) if state.is_main_process else {}
    return metrics


def load_problems(benchmark: str, script_args: EvaluateArguments) -> Dataset:
    """A benchmark's problems, with columns `prompt` and `solution`."""
    if benchmark == EMBEDDED:
        return make_dataset(script_args.num_problems or 128, held_out=True, seed=1)
    known = BENCHMARKS.get(benchmark)
    source = known or Benchmark(benchmark, None, None, script_args.split)
    instruction = source.instruction if script_args.instruction is None else script_args.instruction
    dataset = load_prompt_dataset(source.dataset_name, source.dataset_config)
    problems = to_prompts_and_solutions(get_split(dataset, source.split, "split"), instruction)
    warn_of_unparsed_solutions(problems, source.split)
    return problems.select(range(min(script_args.num_problems or len(problems), len(problems))))


def make_store(
    name: str, benchmark: str, problems: list[dict], script_args: EvaluateArguments, model_args: ModelConfig
) -> PartStore:
    """Where the completions of a model are kept; it refuses those of other settings, weights or problems."""
    settings = {key: value for key, value in asdict(script_args).items() if key not in NOT_IN_COMPLETIONS}
    settings |= {"model": name, "revision": model_args.model_revision, "dtype": model_args.dtype}
    settings["weights"] = {file.name: file.stat().st_mtime_ns for file in sorted(Path(name).glob("*.safetensors"))}
    settings["problems"] = hashlib.sha256(json.dumps(problems, sort_keys=True).encode()).hexdigest()
    settings["num_processes"] = PartialState().num_processes
    folders = (path.strip("/").replace("/", "--") for path in (name, benchmark))
    folder = Path(script_args.output_dir, *folders)
    return PartStore(folder, settings, split="test")


def complete(
    problems: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    sampler: Callable[[float], Sampler],
    script_args: EvaluateArguments,
) -> list[dict[str, Any]]:
    """Complete some problems, each process its share of them; all get all rows."""
    with PartialState().split_between_processes(problems) as local_problems:
        prompts = [maybe_apply_chat_template({"prompt": p["prompt"]}, tokenizer)["prompt"] for p in local_problems]
        ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        greedy = sampler(0.0)(ids)
        sampled = sampler(script_args.temperature)([row for row in ids for _ in range(script_args.num_samples)])
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        size = script_args.num_samples
        rows = [
            {
                "prompt": prompt,
                "solution": problem["solution"],
                "greedy": tokenizer.decode(answer, skip_special_tokens=True),
                "greedy_is_truncated": is_truncated(answer, tokenizer, script_args.max_new_tokens),
                "samples": texts[index * size : (index + 1) * size],
            }
            for index, (problem, prompt, answer) in enumerate(zip(local_problems, prompts, greedy, strict=True))
        ]
    return gather_object(rows)


def is_truncated(ids: list[int], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> bool:
    """Whether a completion is as long as may be and has no end."""
    return len(ids) == max_new_tokens and not set(ids) & set(tokenizer.all_special_ids)


def report(results: Results, script_args: EvaluateArguments) -> None:
    """Write `results.json` and the picture, and show the table."""
    console, output_dir = Console(), Path(script_args.output_dir)
    with written_whole(output_dir / "results.json") as unfinished:
        unfinished.write_text(json.dumps({"settings": asdict(script_args), "results": results}, indent=2) + "\n")
    if script_args.num_samples:
        plot_maj_and_pass(results, output_dir / "maj_and_pass.png")
    for benchmark in script_args.benchmarks:
        console.print(results_table(benchmark, {model: metrics[benchmark] for model, metrics in results.items()}))
    console.print(f"Completions and results.json are in {output_dir}/")


def results_table(benchmark: str, metrics: dict[str, dict[str, Any]]) -> Table:
    num_problems = next(iter(metrics.values()))["num_problems"]
    table = Table(title=f"{benchmark}: {num_problems} problems (%, with 95 % interval)")
    table.add_column("")
    for model in metrics:
        table.add_column(Path(model).name, justify="right")
    for name, example in next(iter(metrics.values())).items():
        if isinstance(example, dict):
            cells = (
                "{value:.1f}  ({low:.1f} to {high:.1f})".format(**{k: 100 * v for k, v in of_model[name].items()})
                for of_model in metrics.values()
            )
            table.add_row(name, *cells)
    for name in ("unparsed", "truncated"):
        table.add_row(f"{name}, greedy", *(f"{100 * of_model[name]:.1f}" for of_model in metrics.values()))
    return table


def plot_maj_and_pass(results: Results, path: Path) -> None:
    """Draw Maj@K and Pass@K over K, as the paper's Fig. 7: a panel a benchmark, a color a model."""
    if find_spec("matplotlib") is None:
        Console().print("No picture was drawn: `pip install matplotlib` first.")
        return
    from matplotlib.figure import Figure

    benchmarks = list(next(iter(results.values())))
    figure = Figure(figsize=(5.5 * len(benchmarks), 4.5), layout="constrained")
    for axes, benchmark in zip(figure.subplots(1, len(benchmarks), squeeze=False)[0], benchmarks, strict=True):
        for index, (model, metrics) in enumerate(results.items()):
            for metric, style in (("pass", "--"), ("maj", "-")):
                points = {
                    int(name.split("@")[1]): interval
                    for name, interval in metrics[benchmark].items()
                    if name.startswith(metric + "@")
                }
                values, low, high = (
                    [100 * interval[bound] for interval in points.values()] for bound in ("value", "low", "high")
                )
                label = f"{Path(model).name}, {metric.capitalize()}@K"
                axes.plot(list(points), values, style, color=f"C{index}", marker="o", label=label)
                axes.fill_between(list(points), low, high, color=f"C{index}", alpha=0.12)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), [str(k) for k in points])
        axes.set_xlabel("K")
        axes.set_ylabel("accuracy (%)")
        axes.set_title(Path(benchmark).name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def run(argv: list[str] | None = None) -> None:
    """Parse the arguments and run the job; the entry point of the recipe."""
    main(*TrlParser((EvaluateArguments, ModelConfig)).parse_args_and_config(argv))


if __name__ == "__main__":
    run()
