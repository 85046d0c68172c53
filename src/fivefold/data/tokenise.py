"""Documents to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.data.documents import PIECE_BYTES, Piece, read
from fivefold.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Tokenised:
    """Some documents, one after the other, each with its end token.

    tokens      [tokens] uint16 or uint32
    lengths     [documents] int64, end tokens counted
    text_bytes  size of the text as UTF-8
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    text_bytes: int


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that tokens are stored as."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def tokenise(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Tokenised:
    """All documents of some pieces. Raises `BadInput` for what cannot be read."""
    kind = token_type(tokenizer.vocab_size)
    end = np.array([tokenizer.end], dtype=kind)
    parts: list[NDArray[np.unsignedinteger]] = []
    lengths: list[int] = []
    text_bytes = 0
    for piece in pieces:
        for text in read(piece):
            ids = tokenizer.encode(text).astype(kind)
            parts += [ids, end]
            lengths.append(len(ids) + 1)
            text_bytes += len(text.encode())
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=kind)
    return Tokenised(tokens, np.array(lengths, dtype=np.int64), text_bytes)


def tasks_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbouring pieces put together until a task is worth sending to another process."""
    tasks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            tasks.append([])
            room = PIECE_BYTES
        tasks[-1].append(piece)
        room -= piece.bytes
    return tasks
