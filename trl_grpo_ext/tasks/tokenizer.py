"""The tokenizer of the embedded task: byte-level BPE, digits one by one, built from the task's own text."""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .word_problems import reference_solution, sample_problems, word_problem


PAD_TOKEN, END_TOKEN, USER_TOKEN, ASSISTANT_TOKEN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(vocab_size: int = 384, num_problems: int = 2000) -> PreTrainedTokenizerFast:
    """
    Train the tokenizer on problems and solutions of the training split.

    Args:
        vocab_size (`int`, *optional*, defaults to `384`):
            Upper bound of the vocabulary; the 256 bytes are always in it, so that any text can be written.
        num_problems (`int`, *optional*, defaults to `2000`):
            Number of problems to train on.
    """
    rng = random.Random(0)
    texts = [
        f"{word_problem(problem, rng)}\n{reference_solution(problem)}"
        for problem in sample_problems(num_problems, held_out=False, seed=0)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, END_TOKEN, USER_TOKEN, ASSISTANT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[USER_TOKEN, ASSISTANT_TOKEN],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
