import pytest
from transformers import AutoModel, AutoTokenizer

from trl_grpo_ext.scripts import warm_start_judge
from trl_grpo_ext.tasks import EMBEDDED_JUDGE, EMBEDDED_POLICY
from trl_grpo_ext.trainers.prm_trainer import IGNORED


PROMPT = [{"role": "user", "content": "Mia has 12 apples."}]
REFERENCE = "12 + 7 = 19\n19 - 5 = 14"


@pytest.mark.parametrize(
    ("solution", "right_part"),
    [(REFERENCE, REFERENCE), ("12 + 7 = 18\n18 - 5 = 13", "12 + 7 = 1"), ("12 + 7 = 19", "12 + 7 = 19")],
)
def test_tokens_are_right_up_to_the_first_that_differs(solution, right_part):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_POLICY)
    row = warm_start_judge.judged_tokens(tokenizer, PROMPT, solution, REFERENCE)
    assert len(row["input_ids"]) == len(row["labels"])
    judged = [(i, label) for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert tokenizer.decode([i for i, _ in judged]) == solution + tokenizer.eos_token
    text = "".join(tokenizer.decode([i]) for i, label in judged if label == 1)
    assert text.removesuffix(tokenizer.eos_token) == right_part
    assert judged[-1] == (tokenizer.eos_token_id, float(solution == REFERENCE))


def test_makes_a_judge_as_the_embedded_one(tmp_path):
    warm_start_judge.run(
        ["--num_problems", "40", "--max_steps", "2", "--per_device_train_batch_size", "8", "--use_cpu", "true",
         "--output_dir", str(tmp_path / "judge")]
    )  # fmt: skip
    made = AutoModel.from_pretrained(tmp_path / "judge").state_dict()
    embedded = AutoModel.from_pretrained(EMBEDDED_JUDGE).state_dict()
    assert {name: value.shape for name, value in made.items()} == {n: v.shape for n, v in embedded.items()}
    policy = AutoModel.from_pretrained(EMBEDDED_POLICY).state_dict()
    assert all((made[name] == value).all() for name, value in policy.items() if name != "norm.weight")
