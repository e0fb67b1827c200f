"""The rows of `benchmarks.frameworks`: how users of each framework train, save and resume with FSDP."""

from benchmarks.framework_rows import accelerated, by_hand, lightning, trainers

ROWS = (*accelerated.ROWS, *trainers.ROWS, *lightning.ROWS, *by_hand.ROWS)
