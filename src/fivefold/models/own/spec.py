"""`OwnSpec`: what is known of a user's own model before it is built with memory."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fivefold.models.spec import ModelSpec


class OwnSpec(ModelSpec):
    """A model that is known by its parts alone, and not by the layers inside them.

    Numbers that such a model does not have are 0, so that whoever counts on them notices.
    """

    module: str = Field(description="where it is found: file.py:Name, or package.module:Name")
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = Field(
        description="name and shape of each parameter, in order: embedding..., blocks.0..., head..."
    )
    takes_documents: bool = Field(description="its blocks can keep the documents of a sequence apart")
    heads: Literal[0] = 0
    kv_heads: Literal[0] = 0
    head_dim: Literal[0] = 0
    ffn: Literal[0] = 0

    @property
    def looks_up(self) -> bool:
        return False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        return self


def part_of(name: str) -> str:
    """The part that a parameter belongs to: `blocks.3.mlp.weight` -> `blocks.3`, `head.weight` -> `head`."""
    return ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
