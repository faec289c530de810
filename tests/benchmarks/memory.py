"""Peak memory of some work, in a process of its own, whose first peak would be that of the process that starts it."""

import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

import psutil
import torch


def peak_bytes(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """How far a process grows while it does what `prepare`, a function of a module, returns for the arguments."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(prepare, arguments, results))
    process.start()
    process.join()
    assert process.exitcode == 0
    return results.get()


def measure(prepare: Callable[..., Callable[[], Any]], arguments: tuple, results) -> None:
    torch.set_num_threads(1)
    work = prepare(*arguments)
    before = psutil.Process().memory_info().rss
    work()
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
