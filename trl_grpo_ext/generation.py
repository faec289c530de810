"""Writing completions outside training, with transformers or vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, get_quantization_config

from .batching import batched, in_eval_mode, map_by_length
from .scorer import no_such_model


BACKENDS = ("transformers", "vllm")
# Writes one continuation for each list of ids
Sampler = Callable[[list[list[int]]], list[list[int]]]


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, **options
) -> GenerationConfig:
    """How to generate with this model, padded so that any tokenizer will do."""
    eos_token_id = model.generation_config.eos_token_id or tokenizer.eos_token_id
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return GenerationConfig(
        max_new_tokens=max_new_tokens, pad_token_id=pad_token_id, eos_token_id=eos_token_id, **options
    )


def sampling_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, temperature: float
) -> GenerationConfig:
    """How to sample from the whole distribution at a temperature."""
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return generation_config(model, tokenizer, max_new_tokens, **options)


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    config: GenerationConfig,
    batch_size: int,
) -> Iterator[str]:
    """Yield a completion's text a prompt."""
    for batch in batched(prompts, batch_size):
        ids = tokenizer(batch, add_special_tokens=False)["input_ids"]
        yield from tokenizer.batch_decode(continue_ids(model, ids, config), skip_special_tokens=True)


@torch.no_grad()
def continue_ids(model: PreTrainedModel, prefixes: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """Continue ids, in one batch; what follows an end is padding."""
    longest = max(map(len, prefixes))
    gaps = [longest - len(prefix) for prefix in prefixes]
    ids = [[config.pad_token_id] * gap + prefix for gap, prefix in zip(gaps, prefixes, strict=True)]
    mask = [[0] * gap + [1] * len(prefix) for gap, prefix in zip(gaps, prefixes, strict=True)]
    outputs = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=config,
    )
    return outputs[:, longest:].tolist()


def model_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    batch_size: int = 64,
) -> Sampler:
    """
    A sampler that continues ids with `model.generate`.

    Args:
        model ([`~transformers.PreTrainedModel`]), tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The policy, or another completer.
        max_new_tokens (`int`, *optional*, defaults to `256`):
            Longest continuation.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, 0 for greedy decoding.
        batch_size (`int`, *optional*, defaults to `64`):
            Continuations written at once; prefixes of similar length go together.

    Returns:
        `Callable`, for [`StepLabeller`].
    """
    if temperature:
        config = sampling_config(model, tokenizer, max_new_tokens, temperature)
    else:
        config = generation_config(model, tokenizer, max_new_tokens, do_sample=False)

    def sample(prefixes: list[list[int]]) -> list[list[int]]:
        with in_eval_mode(model):
            return map_by_length(lambda batch: continue_ids(model, batch, config), prefixes, batch_size)

    return sample


def vllm_sampler(llm: Any, *, max_new_tokens: int = 256, temperature: float = 1.0) -> Sampler:
    """
    A sampler that continues ids with vLLM.

    Args:
        llm (`vllm.LLM`):
            The policy, or another completer.
        max_new_tokens (`int`, *optional*, defaults to `256`):
            Longest continuation.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, 0 for greedy decoding.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=max_new_tokens)

    def sample(prefixes: list[list[int]]) -> list[list[int]]:
        requests = llm.generate([{"prompt_token_ids": ids} for ids in prefixes], params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in requests]

    return sample


def load_tokenizer(name: str, field: str = "model_name_or_path", **options) -> PreTrainedTokenizerBase:
    """
    Load the tokenizer of a model to write with.

    Args:
        name (`str`), field (`str`, *optional*, defaults to `"model_name_or_path"`):
            Hub id or folder, and the argument that has it.
        **options:
            Those of `AutoTokenizer.from_pretrained`.

    Raises:
        `ValueError`: if there is no such model, or its tokenizer is missing or broken.
    """
    try:
        return AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    except OSError as error:
        raise no_such_model(name, error, field) from error
    except ValueError as error:
        raise ValueError(
            f"`{field}` is {name!r}, which has no tokenizer that can be loaded; name a model with its tokenizer "
            "beside it (`tokenizer.save_pretrained`, for an adapter too)."
        ) from error


def load_sampler(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelConfig,
    backend: str,
    *,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
) -> Callable[[float], Sampler]:
    """
    Load a model to write with.

    Args:
        name (`str`):
            Hub id or folder of a model; with transformers also of an adapter.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        model_args ([`~trl.ModelConfig`]):
            Revision, type, attention and quantization.
        backend (`str`):
            `"transformers"`, on the device of this process, or `"vllm"`, one process on all of the machine's GPUs.
        max_new_tokens, batch_size (`int`):
            As in [`model_sampler`].
        seed (`int`):
            Seed of vLLM's sampling; transformers has torch's.

    Returns:
        `Callable[[float], Sampler]`: the sampler of a temperature.

    Raises:
        `ValueError`: if there is no such model, or vLLM is asked for in several processes or for an adapter.
    """
    if backend == "vllm":
        llm = load_vllm(name, model_args, seed)
        return lambda temperature: vllm_sampler(llm, max_new_tokens=max_new_tokens, temperature=temperature)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            revision=model_args.model_revision,
            dtype=model_args.dtype,
            attn_implementation=model_args.attn_implementation,
            quantization_config=get_quantization_config(model_args),
            device_map={"": PartialState().device},
        )
    except OSError as error:
        raise no_such_model(name, error) from error
    return lambda temperature: model_sampler(
        model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size
    )


def load_vllm(name: str, model_args: ModelConfig, seed: int) -> Any:
    """vLLM with a model on all of the machine's GPUs."""
    if PartialState().num_processes > 1:
        raise ValueError("`backend` is 'vllm', which spreads one process over all GPUs; start a single process.")
    if Path(name, "adapter_config.json").exists():
        raise ValueError(f"`backend` is 'vllm', but '{name}' is an adapter; merge it into its base model first.")
    from vllm import LLM

    return LLM(
        model=name,
        revision=model_args.model_revision,
        dtype=model_args.dtype or "auto",
        seed=seed,
        tensor_parallel_size=max(torch.cuda.device_count(), 1),
    )
