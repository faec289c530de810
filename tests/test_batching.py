import time
from itertools import combinations, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.batching import (
    PASS_TOKENS,
    cheapest_cuts,
    cheapest_order,
    group_cost,
    length_groups,
    map_by_length,
    scatter_groups,
)


ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=40)


def padded_mask(rows, scale=1):
    """Masks of prompts padded on the left and completions padded on the right."""
    prompt, completion = (scale * max(1, max(row[i] for row in rows)) for i in (0, 1))
    mask = torch.zeros(len(rows), prompt + completion, dtype=torch.long)
    for i, (before, after) in enumerate(rows):
        mask[i, prompt - scale * before : prompt + scale * after] = 1
    return mask, completion


@given(ROWS, st.sampled_from([1, 50]), st.booleans(), st.booleans())
def test_each_row_is_in_one_group_with_all_of_its_tokens(rows, scale, trims_left, splits):
    mask, keep = padded_mask(rows, scale)
    groups = length_groups(mask, keep, trims_left, splits)
    assert sorted(torch.cat([group.rows for group in groups]).tolist()) == list(range(len(rows)))
    for group in groups:
        window = mask[group.rows, group.start : group.end]
        assert window.sum() == mask[group.rows].sum()
        assert group.end > mask.shape[1] - keep  # a completion column for each
    if not trims_left:
        assert {group.start for group in groups} == {0}
    if not splits:
        assert len(groups) == 1
    computed = sum(len(group.rows) * (group.end - group.start) + PASS_TOKENS for group in groups)
    assert computed <= mask.numel() + PASS_TOKENS


@given(ROWS, st.booleans())
def test_values_come_back_to_their_places(rows, splits):
    mask, keep = padded_mask(rows, 50)
    values = torch.rand(len(rows), keep) * mask[:, -keep:]
    groups = length_groups(mask, keep, True, splits)
    first = mask.shape[1] - keep
    parts = [values[group.rows, : group.end - first] for group in groups]
    assert torch.equal(scatter_groups(parts, groups, keep), values)


def test_long_and_short_rows_are_kept_apart():
    mask, keep = padded_mask([(10, 10)] * 8 + [(10, 1000)] * 2)
    groups = length_groups(mask, keep, True, True)
    computed = sum(len(group.rows) * (group.end - group.start) for group in groups)
    assert computed < 0.6 * mask.numel()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(11, 400), st.integers(0, 2)), min_size=1, max_size=8),
    st.booleans(),
)
def test_no_other_cuts_compute_less(rows, shares_prompts):
    starts, ends, prompts = (list(column) for column in zip(*sorted(rows, key=lambda row: row[1]), strict=True))

    def cost(cuts):
        total = 0
        for first, last in pairwise(cuts):
            count = len(set(prompts[first:last])) if shares_prompts else last - first
            total += group_cost(last - first, count, min(starts[first:last]), 10, max(ends[first:last]))
        return total

    inner = range(1, len(rows))
    every = [[0, *cuts, len(rows)] for size in range(len(rows)) for cuts in combinations(inner, size)]
    least, chosen = cheapest_cuts(starts, ends, prompts if shares_prompts else None, 10, True)
    assert least == cost(chosen) == min(map(cost, every))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_batches_of_the_order_compute_no_more_than_by_length_or_by_prompt(rows, batch_size, shares_prompts, random):
    rows = rows * batch_size
    random.shuffle(rows)
    mask, keep = padded_mask(rows)
    first = mask.shape[1] - keep
    prompt_of = torch.tensor([before % 3 for before, _ in rows]) if shares_prompts else None

    def cost(order):
        total = 0
        for batch in order.split(batch_size):
            prompts = None if prompt_of is None else prompt_of[batch]
            for group in length_groups(mask[batch], keep, True, True, prompts):
                count = len(group.rows if prompts is None else prompts[group.rows].unique())
                total += group_cost(len(group.rows), count, group.start, first, group.end)
        return total

    order = cheapest_order(mask, keep, True, True, batch_size, prompt_of)
    assert sorted(order.tolist()) == list(range(len(rows)))
    by_length = torch.tensor(sorted(range(len(rows)), key=lambda row: -sum(rows[row])))
    assert cost(order) <= cost(by_length)
    if shares_prompts:
        assert cost(order) <= cost(torch.tensor(sorted(by_length.tolist(), key=lambda row: rows[row][0] % 3)))


def test_many_rows_are_cut_in_no_time():
    lengths = torch.randint(20, 2000, (4096,)).sort().values.tolist()
    started = time.perf_counter()
    assert len(cheapest_cuts([0] * 4096, lengths, None, 10, True)[1]) <= 33
    assert time.perf_counter() - started < 5


def test_rows_of_one_length_are_one_group():
    mask, keep = padded_mask([(300, 700)] * 16)
    assert len(length_groups(mask, keep, True, True)) == 1


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=20), st.integers(1, 7))
def test_rows_are_mapped_in_batches_of_similar_length(rows, batch_size):
    batches = []

    def sums(batch):
        batches.append([len(row) for row in batch])
        return [sum(row) for row in batch]

    assert map_by_length(sums, rows, batch_size) == [sum(row) for row in rows]
    lengths = [length for batch in batches for length in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert all(len(batch) == batch_size for batch in batches[:-1])
