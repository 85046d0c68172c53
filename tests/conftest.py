"""Tests run their ranks one thread each: the machine has two cores and the ranks share them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
