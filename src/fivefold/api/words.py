"""Problems in Python's words.

What is wrong with an input is said once, in the words of the command line (`--seq-len`). There an option
begins with two dashes, and nothing else does: so every text can be told in Python's words (`seq_len`) too.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.problems import BadInput, Problem

OPTION = re.compile(r"(?<![\w'])--([a-z][a-z-]*(?:\.[a-z_]+)?)(?: (auto|\d\w*(?:[.,]\w+)*))?")
"""An option, and its value where a number or `auto` follows; not what a user gave, which stands in quotes."""


def in_python(text: str) -> str:
    """A text with arguments in place of options: `--seq-len 512` is `seq_len=512`."""
    return OPTION.sub(_argument, text)


def _argument(option: re.Match[str]) -> str:
    name, value = option[1].replace("-", "_"), option[2]
    if value is None:
        return name
    return f"{name}={value}" if value.isdecimal() else f'{name}="{value}"'


@contextmanager
def python_words() -> Iterator[None]:
    """Let `BadInput` out of the block, or of the function that this decorates, in Python's words."""
    try:
        yield
    except BadInput as error:
        told = ((problem.key, problem.message, problem.hint) for problem in error.problems)
        raise BadInput([Problem(*map(in_python, texts)) for texts in told]) from None
