from trl_grpo_ext.tasks import make_sums_dataset, working_reward


def test_sums_are_true_and_score():
    row = make_sums_dataset(5, seed=2)[0]
    numbers = [int(number) for number in row["prompt"][-1]["content"].split(" + ")]
    assert int(row["solution"]) == sum(numbers)
    first, second = sum(numbers[:2]), sum(numbers)
    assert row["equations"] == [
        f"{numbers[0]} + {numbers[1]} = {first}",
        f"{first} + {numbers[2]} = {second}",
    ]
    lines = [*(f"{equation}\n" for equation in row["equations"]), rf"The answer is \boxed{{{second}}}."]
    assert working_reward([lines], [row["equations"]], [row["solution"]]) == [[1, 1, 1]]


def test_splits_share_no_sum_and_neither_holds_the_example():
    training, held_out = make_sums_dataset(1000), make_sums_dataset(1000, held_out=True)
    questions = [row["prompt"][-1]["content"] for rows in (training, held_out) for row in rows]
    assert len(questions) == len(set(questions)) == 728
    assert training[0]["prompt"][1]["content"] not in questions
    assert 50 < len(held_out) < 100
