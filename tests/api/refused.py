"""What is said of arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import fivefold


def refused(function: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(fivefold.BadInput) as caught:
        function(*args, **more)
    return str(caught.value)
