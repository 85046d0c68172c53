"""Tokenised sources on disk: made once, memory-mapped ever after.

A source lives in a folder named by its content, its tokenizer and the format:

    tokens.bin      every document's tokens and its end token, one after the other (uint16 or uint32)
    documents.npy   where each document begins, and at last where the last one ends (int64)
    meta.json       what this is, and size and checksums of the two files
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.data.damage import damage, read_meta, write_meta
from fivefold.data.documents import read
from fivefold.data.once import build_once
from fivefold.data.progress import progress_bar
from fivefold.data.sources import Source
from fivefold.data.tokenise import tasks_of, token_type
from fivefold.data.tokenizer import FileTokenizer, Tokenizer, train_bpe
from fivefold.data.workers import tokenise_all
from fivefold.problems import BadInput, Problem
from fivefold.threads import cores

FORMAT = 1
TOKENS, DOCUMENTS, TOKENIZER = "tokens.bin", "documents.npy", "tokenizer.json"

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
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()) / "fivefold"


def open_cache(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    workers: int | None,
    progress: bool,
    closely: bool = True,
) -> TokenCache:
    """The tokens of `source`, from the cache in `folder`, which is built first if need be.

    workers   processes that tokenise; None takes one for each core
    progress  show a bar on standard error while building, if that is a terminal
    closely   compare what is there with its checksums; else with its sizes

    A damaged cache is built again, and that is said. Any number of processes may ask at once: one builds,
    the others wait for it. Raises `BadInput` for a source that cannot be read or holds no text.
    """
    key = source.content_key()
    name = _digest("tokens", FORMAT, key, tokenizer.fingerprint)

    def fill(partial: Path) -> None:
        _build(source, tokenizer, partial, workers or cores(), progress)
        if source.content_key() != key:
            raise BadInput(
                [Problem("data.source", f"'{source.name}' changed while it was read", "Start again.")]
            )

    done = _whole(folder / f"tokens-{name}", fill, closely)
    meta = read_meta(done)
    tokens = np.memmap(done / TOKENS, dtype=meta["dtype"], mode="r")
    return TokenCache(done, np.asarray(tokens), np.load(done / DOCUMENTS), meta["text_bytes"])


def open_bpe(sources: Sequence[Source], vocab_size: int, folder: Path, progress: bool) -> FileTokenizer:
    """The BPE of `vocab_size` tokens for these sources, trained now unless `folder` has it already."""
    name = _digest("bpe", FORMAT, vocab_size, *(source.content_key() for source in sources))

    def fill(partial: Path) -> None:
        pieces = [piece for source in sources for piece in source.pieces()]
        every = -(-sum(piece.bytes for piece in pieces) // BPE_TRAINING_BYTES) or 1
        texts = (text for piece in pieces[::every] for text in read(piece))
        train_bpe(texts, vocab_size, partial / TOKENIZER, progress)
        write_meta(partial, {"vocab_size": vocab_size}, (TOKENIZER,))

    return FileTokenizer(_whole(folder / f"bpe-{name}", fill) / TOKENIZER)


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
    }
    write_meta(folder, meta, (TOKENS, DOCUMENTS))


def _whole(place: Path, fill: Callable[[Path], None], closely: bool = True) -> Path:
    """The folder `place` with what `fill` puts there; a damaged one is built again, and that is said."""
    if place.exists():
        wrong = damage(place, closely)
        if wrong is None:
            return place
        print(f"the cache {place} is damaged: {wrong}. It is built again.", file=sys.stderr)
    return build_once(place, lambda folder: damage(folder, closely) is None, fill)


def _digest(*parts: int | str) -> str:
    text = "\0".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
