"""`import fivefold`: its names, what it imports, and problems in Python's words."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fivefold
from fivefold.api.words import in_python


def test_importing_and_looking_around_imports_nothing_heavy() -> None:
    text = "import sys, fivefold; dir(fivefold); print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_planning_and_jobs_need_no_torch() -> None:
    text = (
        "import sys, fivefold; fivefold.plan('tiny', cluster='laptop', gpus=1).job(); fivefold.simulate;"
        "fivefold.read_metrics; fivefold.train; fivefold.verify; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_name_is_listed_and_there() -> None:
    listed = [name for name in dir(fivefold) if not name.startswith("__")]
    assert listed == sorted(fivefold.__all__)
    assert all(getattr(fivefold, name) is not None for name in listed)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        fivefold.plam  # noqa: B018


def test_problems_are_told_in_pythons_words() -> None:
    assert in_python("With --seq-len 512 and the same: 1 s.") == "With seq_len=512 and the same: 1 s."
    assert in_python("--tokens 1.5T --gpus auto.") == 'tokens="1.5T" gpus="auto".'
    assert in_python("'auto' needs --tokens and --deadline") == "'auto' needs tokens and deadline"
    assert in_python("'--gpus' is what you gave") == "'--gpus' is what you gave"
    assert in_python("--training.steps") == "training.steps"
