"""Why a job cannot be split the way it asks: the complaints of every axis, before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.axes import context, data, expert, pipeline, tensor
from fivefold.problems import Problem

if TYPE_CHECKING:
    from fivefold.config import Job


def check(job: Job) -> list[Problem]:
    """Every axis' problems with a resolved job; empty when it can be split."""
    return [problem for axis in (data, tensor, pipeline, context, expert) for problem in axis.check(job)]
