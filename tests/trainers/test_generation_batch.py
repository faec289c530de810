import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.trainers.generation_batch import PromptStream, is_live, join_groups, split_groups


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=6))
def test_a_stream_gives_each_row_once_an_epoch_however_it_is_taken(num_rows, amounts):
    stream = PromptStream(num_rows, seed=0)
    taken = [row for amount in amounts for row in stream.take(amount)]
    assert taken == PromptStream(num_rows, seed=0).take(sum(amounts))
    for start in range(0, len(taken) - num_rows + 1, num_rows):
        assert sorted(taken[start : start + num_rows]) == list(range(num_rows))


@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 20))
def test_a_stream_goes_on_from_its_position(num_rows, before, after):
    stream = PromptStream(num_rows, seed=3)
    stream.take(before)
    assert PromptStream(num_rows, seed=3, position=before).take(after) == stream.take(after)


def test_epochs_and_seeds_have_other_orders():
    stream = PromptStream(50, seed=0)
    first, second = stream.take(50), stream.take(50)
    assert first != second
    assert PromptStream(50, seed=7).take(50) != first


def generation_batch(prompt_length, length, rows, offset):
    """Rows whose numbers say which row they are of."""
    row = torch.arange(offset, offset + rows).unsqueeze(1)
    return {
        "prompt_ids": row.expand(rows, prompt_length),
        "prompt_mask": torch.ones(rows, prompt_length, dtype=torch.long),
        "completion_ids": row.expand(rows, length),
        "completion_mask": torch.ones(rows, length, dtype=torch.long),
        "advantages": row.squeeze(1).float(),
        "num_items_in_batch": torch.tensor(rows * length),
    }


def test_groups_of_other_lengths_are_padded_on_their_side():
    first, second = generation_batch(2, 3, 4, offset=10), generation_batch(3, 2, 4, offset=20)
    groups = [*split_groups(first, 2), *split_groups(second, 2)]
    joined = join_groups([groups[3], groups[0]], pad_token_id=9)
    assert joined["prompt_ids"].tolist() == [[22] * 3, [23] * 3, [9, 10, 10], [9, 11, 11]]
    assert joined["prompt_mask"].tolist() == [[1] * 3, [1] * 3, [0, 1, 1], [0, 1, 1]]
    assert joined["completion_ids"].tolist() == [[22, 22, 9], [23, 23, 9], [10] * 3, [11] * 3]
    assert joined["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 0], [1] * 3, [1] * 3]
    assert joined["advantages"].tolist() == [22, 23, 10, 11]
    assert "num_items_in_batch" not in joined


def test_token_advantages_may_make_a_group_live():
    assert not is_live({"advantages": torch.zeros(2, 3)})
    assert is_live({"advantages": torch.tensor([[0, 0.1, 0], [0, 0, 0]])})
    assert not is_live({"advantages": torch.zeros(2)})
