import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_grpo_ext.scripts import warm_start
from trl_grpo_ext.tasks import EMBEDDED_POLICY


ARGUMENTS = ["--num_problems", "64", "--max_steps", "2", "--per_device_train_batch_size", "16", "--use_cpu", "true"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("warm") / "policy"
    warm_start.run([*ARGUMENTS, "--output_dir", str(output_dir)])
    return output_dir


def test_makes_a_policy_of_the_size_and_vocabulary_of_the_embedded_one(policy):
    made = AutoModelForCausalLM.from_pretrained(policy)
    embedded = AutoModelForCausalLM.from_pretrained(EMBEDDED_POLICY)
    assert {name: value.shape for name, value in made.state_dict().items()} == {
        name: value.shape for name, value in embedded.state_dict().items()
    }
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(EMBEDDED_POLICY).get_vocab()


def test_trains_further_from_a_policy(policy, tmp_path):
    arguments = [*ARGUMENTS, "--learning_rate", "0", "--start_from", str(policy)]
    warm_start.run([*arguments, "--output_dir", str(tmp_path / "again")])
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in (policy, tmp_path / "again"))
    assert all((a == b).all() for a, b in zip(first.parameters(), second.parameters(), strict=True))
