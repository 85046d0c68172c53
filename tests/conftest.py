"""Tests run on the CPU, one thread a rank: the ranks share the cores, and a machine may have one GPU or none.

`pytest tests/gpu` is for what only a GPU can show, and sees it.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
