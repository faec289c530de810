"""Peak memory of some work, in a process of its own, whose first peak would be that of the process that starts it."""

import multiprocessing
import os
import resource
from collections.abc import Callable
from typing import Any

import psutil
import torch


def peak_bytes(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """How far a process grows while it does what `prepare`, a function of a module, returns for the arguments."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc gives back what is freed, and the peak is no matter of luck
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
