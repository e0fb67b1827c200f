"""The tests. Before anything imports torch: a process has one core, and needs no pool of processes to compile in."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
