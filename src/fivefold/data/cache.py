"""Tokenised sources on disk: made once, memory-mapped ever after.

A source lives in a folder named by its content, its tokenizer and the format:

    tokens.bin      every document's tokens and its end token, one after the other (uint16 or uint32)
    documents.npy   where each document begins, and at last where the last one ends (int64)
    meta.json       what this is, and how large the two files have to be
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.data.documents import read
from fivefold.data.once import build_once
from fivefold.data.progress import progress_bar
from fivefold.data.sources import Source
from fivefold.data.tokenise import tasks_of, token_type
from fivefold.data.tokenizer import FileTokenizer, Tokenizer, train_bpe
from fivefold.data.workers import tokenise_all
from fivefold.problems import BadInput, Problem

FORMAT = 1
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"

# Starting processes costs more than tokenising this much.
SMALL = 8 << 20
# Of a larger source, the BPE is trained on evenly spread pieces that come to about this much.
BPE_TRAINING_BYTES = 64 << 20


@dataclass(frozen=True)
class TokenCache:
    """A tokenised source.

    tokens   [tokens] uint16 or uint32, memory-mapped
    offsets  [documents + 1] int64
    """

    folder: Path
    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    text_bytes: int


def default_folder() -> Path:
    """Where caches go when the user names no folder."""
    return Path("~/.cache/fivefold").expanduser()


def open_cache(
    source: Source, tokenizer: Tokenizer, folder: Path, workers: int | None, progress: bool
) -> TokenCache:
    """The tokens of `source`, from the cache in `folder`, which is built first if need be.

    workers   processes that tokenise; None takes one for each core
    progress  show a bar on standard error while building, if that is a terminal

    Any number of processes may ask at once: one builds, the others wait for it. Raises `BadInput`
    for a source that cannot be read or holds no text.
    """
    key = source.content_key()
    name = _digest("tokens", FORMAT, key, tokenizer.fingerprint)

    def fill(partial: Path) -> None:
        _build(source, tokenizer, partial, workers or _cores(), progress)
        if source.content_key() != key:
            raise BadInput(
                [Problem("data.source", f"'{source.name}' changed while it was read", "Start again.")]
            )

    done = build_once(folder / f"tokens-{name}", _complete, fill)
    meta = _meta(done)
    tokens = np.memmap(done / TOKENS, dtype=meta["dtype"], mode="r")
    return TokenCache(done, np.asarray(tokens), np.load(done / DOCUMENTS), meta["text_bytes"])


def open_bpe(sources: Sequence[Source], vocab_size: int, folder: Path, progress: bool) -> FileTokenizer:
    """The BPE of `vocab_size` tokens for these sources, trained now unless `folder` has it already."""
    name = _digest("bpe", FORMAT, vocab_size, *(source.content_key() for source in sources))

    def fill(partial: Path) -> None:
        pieces = [piece for source in sources for piece in source.pieces()]
        every = -(-sum(piece.bytes for piece in pieces) // BPE_TRAINING_BYTES) or 1
        texts = (text for piece in pieces[::every] for text in read(piece))
        train_bpe(texts, vocab_size, partial / "tokenizer.json", progress)

    done = build_once(folder / f"bpe-{name}", _trained, fill)
    return FileTokenizer(done / "tokenizer.json")


def _build(source: Source, tokenizer: Tokenizer, folder: Path, workers: int, progress: bool) -> None:
    pieces = source.pieces()
    tasks = tasks_of(pieces)
    total = sum(piece.bytes for piece in pieces)
    processes = 1 if total <= SMALL else min(workers, len(tasks))
    lengths: list[NDArray[np.int64]] = []
    text_bytes = 0
    with (
        (folder / TOKENS).open("wb") as file,
        progress_bar(f"tokenising {source.name}", total, progress) as advance,
    ):
        for task, part in zip(tasks, tokenise_all(tasks, tokenizer, processes), strict=True):
            file.write(part.tokens.tobytes())
            lengths.append(part.lengths)
            text_bytes += part.text_bytes
            advance(sum(piece.bytes for piece in task))
    if text_bytes == 0:
        raise BadInput(
            [
                Problem(
                    "data.source",
                    f"'{source.name}' holds no text",
                    f"Files read: {len(source.files)}, all empty.",
                )
            ]
        )
    np.save(folder / DOCUMENTS, np.concatenate([np.zeros(1, dtype=np.int64), *lengths]).cumsum())
    meta = {
        "source": source.name,
        "tokenizer": tokenizer.fingerprint,
        "dtype": np.dtype(token_type(tokenizer.vocab_size)).name,
        "text_bytes": text_bytes,
        "sizes": {name: (folder / name).stat().st_size for name in (TOKENS, DOCUMENTS)},
    }
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _complete(folder: Path) -> bool:
    """Whether a cache is all there; a truncated file is noticed by its size."""
    try:
        sizes = _meta(folder)["sizes"]
        return all((folder / name).stat().st_size == sizes[name] for name in (TOKENS, DOCUMENTS))
    except (OSError, ValueError, KeyError):
        return False


def _trained(folder: Path) -> bool:
    try:
        FileTokenizer(folder / "tokenizer.json")
    except BadInput:
        return False
    return True


def _meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    return meta


def _digest(*parts: int | str) -> str:
    text = "\0".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
