"""Whether two answers are the same mathematics, told by math-verify in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path


SECONDS_TO_VERIFY = 5.0
TOOK_TOO_LONG = -getattr(signal, "SIGALRM", 0)  # what the process returns whose alarm has ended it
WORKER = Path(__file__).with_name("math_verify_worker.py")


class MathVerifyProcess:
    """
    math-verify in a process that lives from the first question on, and that ends itself where one takes too long.

    It may be asked from any thread. math-verify's own time limit works in the main thread only, and no limit within a
    process ends a computation that holds the interpreter.

    Args:
        seconds (`float`, *optional*, defaults to `5.0`):
            Time that a question may take, besides the start of the process.
    """

    def __init__(self, seconds: float = SECONDS_TO_VERIFY):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def same(self, answer: str, gold: str) -> bool | None:
        """Whether two answers are the same; `None` if it took too long, or math-verify failed."""
        question = json.dumps([answer, gold, self.seconds])
        with self._lock:
            reply, was_killed = self._ask(question)
            if was_killed:
                reply, _ = self._ask(question)
        return json.loads(reply) if reply else None

    def _ask(self, question: str) -> tuple[str, bool]:
        """The answer, nothing if the process has ended, and whether it was killed and did not end itself."""
        process = self._running()
        reply = ask(process, question)
        # Waited for, so that the next question is not asked of a process that is about to end
        return reply, not reply and process.wait() < 0 and process.returncode != TOOK_TOO_LONG

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            # -P: what lies beside the worker is not to be imported in place of the standard library
            command = [sys.executable, "-P", str(WORKER)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self._process


def ask(process: subprocess.Popen, question: str) -> str:
    """The line that a process answers, nothing if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except OSError:
        return ""
    return process.stdout.readline()


@lru_cache(maxsize=10_000)
def same_mathematics(answer: str, gold: str) -> bool | None:
    """Whether math-verify takes two answers for the same, `None` if it cannot tell in time."""
    return process_of(os.getpid()).same(answer, gold)


@lru_cache(maxsize=1)
def process_of(pid: int) -> MathVerifyProcess:
    """Each process asks one of its own: a fork must not share the pipes of what it came from."""
    return MathVerifyProcess()
