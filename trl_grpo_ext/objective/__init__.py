"""Pure tensor functions of the paper's section 4.1: no trainer, no I/O, no config object."""

from .advantages import outcome_advantages, process_advantages


__all__ = ["outcome_advantages", "process_advantages"]
