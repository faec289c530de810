"""
All that is measured of speed and memory on a CPU, ours and TRL's alternately.

    python -m tests.benchmarks
"""

from . import overheads, training_step


if __name__ == "__main__":
    overheads.main()
    training_step.main([])
