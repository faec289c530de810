import multiprocessing
import os
import signal
import threading
import time

import pytest

from trl_grpo_ext.rewards import answer_reward
from trl_grpo_ext.rewards.symbolic import MathVerifyProcess, process_of


# Valid, short, without a tower, and for many minutes no work of the interpreter's
ENDLESS = "(1+x)^{5000}", "(1+x)^{4999}+1"


@pytest.fixture
def process():
    process = MathVerifyProcess(seconds=3)
    process.same("x", "x")  # started
    return process


def test_a_checker_that_hangs_is_ended_and_the_next_answer_is_checked(process):
    started = time.perf_counter()
    assert process.same(*ENDLESS) is None
    assert time.perf_counter() - started < 10
    assert process.same("x+1", "1+x") is True
    assert process.same("x+2", "1+x") is False


def test_a_checker_that_hangs_is_ended_by_its_alarm_and_not_asked_again(process):
    started = time.perf_counter()
    for _ in range(3):
        assert process.same(*ENDLESS) is None
        assert process._process.returncode == -signal.SIGALRM
    assert time.perf_counter() - started > 3 * 3


def test_a_question_that_is_asked_again_and_takes_too_long_leaves_none_to_a_process_about_to_end(process):
    threading.Timer(0.5, process._process.kill).start()
    assert process.same(*ENDLESS) is None
    assert process._process.returncode == -signal.SIGALRM  # it was waited for
    assert process.same("x+1", "1+x") is True


def test_a_checker_that_was_killed_is_started_again(process):
    os.kill(process._process.pid, signal.SIGKILL)
    assert process.same("x+1", "1+x") is True


def test_what_math_verify_cannot_read_is_no_answer(process):
    assert process.same("\\frac{1}{", "1+x") is False
    assert process.same("\x00\n\u2028", "1+x") is False


def rewards_of(answers, golds, results):
    results.extend(answer_reward([rf"\boxed{{{answer}}}" for answer in answers], golds))


def test_mathematics_is_checked_in_threads():
    results = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=rewards_of, args=([f"x + {n}", f"{n} - x"], [f"{n} + x"] * 2, results[n]))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0, 0.0]] * 4


def send_rewards(pipe):
    pipe.send(
        [answer_reward([r"\boxed{x + y}", r"\boxed{x - y}"], ["y + x"] * 2), process_of(os.getpid())._process.pid]
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_mathematics_is_checked_in_processes_each_with_a_checker_of_its_own(method):
    assert answer_reward([r"\boxed{u + v}"], ["v + u"]) == [1.0]
    ours = process_of(os.getpid())._process.pid
    receiver, sender = multiprocessing.Pipe()
    # A daemon, which may not have processes of multiprocessing's
    child = multiprocessing.get_context(method).Process(target=send_rewards, args=(sender,), daemon=True)
    child.start()
    assert receiver.poll(60)
    rewards, theirs = receiver.recv()
    child.join()
    assert rewards == [1.0, 0.0]
    assert theirs != ours
    assert answer_reward([r"\boxed{u + w}"], ["w + u"]) == [1.0]
    assert process_of(os.getpid())._process.pid == ours


def test_the_checker_ends_with_its_process():
    receiver, sender = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=send_rewards, args=(sender,))
    child.start()
    assert receiver.poll(60)
    _, checker = receiver.recv()
    child.join()
    deadline = time.perf_counter() + 10
    while time.perf_counter() < deadline and is_running(checker):
        time.sleep(0.05)
    assert not is_running(checker)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_answer_that_takes_too_long_has_no_reward_and_is_counted(caplog):
    logged = {}
    completions = [rf"\boxed{{{ENDLESS[0]}}}", r"\boxed{1}", "nothing", "the answer is 2"]
    rewards = answer_reward(completions, [ENDLESS[1], "1", "1", "1"], log_metric=logged.__setitem__)
    assert rewards == [None, 1.0, 0.0, 0.0]
    assert "1 of 4 answers could not be told right or wrong in time" in caplog.text
    assert logged == {"answer/unparsed": 0.25, "answer/boxed": 0.5, "answer/unchecked": 0.25}
