"""The front door: from the settings of a job to batches.

Open it once, then ask for the batches of one data rank:

    corpus = open_corpus("stdlib", tokenizer="bytes", seq_len=256, vocab_size=320)
    with corpus.train_loader(global_batch=32, micro_batch=8, rank=0, ranks=4) as loader:
        for micro_batches in loader:
            ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.data.cache import TokenCache, default_folder, open_bpe, open_cache
from fivefold.data.dataset import Dataset
from fivefold.data.hashing import key_of
from fivefold.data.loader import Loader
from fivefold.data.order import Order
from fivefold.data.packing import Windows, split
from fivefold.data.sources import RANDOM, find_source
from fivefold.data.synthetic import RandomTokens
from fivefold.data.tokenizer import Tokenizer, bpe_size, open_tokenizer
from fivefold.problems import BadInput, Problem, refuse

HELDOUT_ORDER = "held-out"


@dataclass(frozen=True)
class Part:
    """One source of the mix. `cache` is None for `random`."""

    name: str
    weight: float
    train: Dataset
    heldout: Dataset
    cache: TokenCache | None


@dataclass(frozen=True)
class Corpus:
    """Everything a run is trained and validated on. `open_corpus` makes one."""

    parts: tuple[Part, ...]
    tokenizer: Tokenizer
    order: Order
    separate_documents: bool
    seq_len: int

    def train_loader(
        self,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        shares: int = 1,
    ) -> Loader:
        """This data rank's micro-batches, from optimizer step `start_step` on, without end."""
        return Loader(
            [part.train for part in self.parts],
            self.order,
            separate_documents=self.separate_documents,
            global_batch=global_batch,
            micro_batch=micro_batch,
            rank=rank,
            ranks=ranks,
            start_step=start_step,
            shares=shares,
        )

    def heldout_loader(self, global_batch: int, micro_batch: int, rank: int = 0, ranks: int = 1) -> Loader:
        """The same of held-out documents. Every loader starts at the same first batch.

        The order depends on the data alone, not on the seed of the run; when all has been seen it
        goes round again. Raises `BadInput` when there is not one sequence of held-out tokens.
        """
        refuse(_too_little("held out", self.parts, self.seq_len))
        return Loader(
            [part.heldout for part in self.parts],
            Order(
                [len(part.heldout) for part in self.parts],
                [part.weight for part in self.parts],
                HELDOUT_ORDER,
            ),
            separate_documents=self.separate_documents,
            global_batch=global_batch,
            micro_batch=micro_batch,
            rank=rank,
            ranks=ranks,
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        """By source, a hash over its text and the tokenizer; `random` has none to change."""
        return {
            f"{number} {part.name}": part.cache.folder.name if part.cache else part.name
            for number, part in enumerate(self.parts)
        }

    def describe(self) -> dict[str, Any]:
        """Sizes for a person or a log, ready for JSON; None where `random` has no number.

        documents, tokens, windows (sequences to train on), heldout_windows and bytes_per_token over all
        sources, and the same for each of `sources` with its name and weight.
        """
        sources = [_describe(part) for part in self.parts]
        totals = {
            key: sum(source[key] for source in sources if source[key] is not None) or None
            for key in ("documents", "tokens", "windows", "heldout_windows", "text_bytes")
        }
        return {
            **totals,
            "bytes_per_token": _ratio(totals["text_bytes"], totals["tokens"]),
            "sources": sources,
        }


def open_corpus(
    source: str | Sequence[tuple[str, float]],
    *,
    tokenizer: str = "bytes",
    text_field: str = "text",
    heldout: float = 0.02,
    seq_len: int,
    seed: int = 0,
    separate_documents: bool = True,
    vocab_size: int,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = False,
    closely: bool = True,
    document_length: int | None = None,
) -> Corpus:
    """Open what a job trains on; tokenise it first if the cache does not have it yet.

    source           `stdlib`, `random`, a file, folder or glob; or several as (source, weight)
    tokenizer        `bytes`, a path to a tokenizer.json, or `bpe-N`
    text_field       field of a JSONL object or Parquet row that holds the text
    heldout          fraction of the documents kept for validation
    vocab_size       the model's; the tokenizer may not have more symbols. `random` draws from all of it
    cache            folder of tokenised data; default fivefold in XDG_CACHE_HOME, or in ~/.cache
    workers          processes that tokenise; default one for each core
    progress         show a bar while tokenising, if standard error is a terminal
    closely          compare cached tokens with their checksums; else with their sizes
    document_length  mean document length of `random`; None makes every sequence one document

    Raises `BadInput` for a source that is missing, empty, not UTF-8 or too short for one sequence, for
    a tokenizer that cannot be used or has more symbols than the model, and for a cache folder that
    cannot be written.
    """
    mix = [(source, 1.0)] if isinstance(source, str) else list(source)
    if not mix:
        raise BadInput([Problem("data.source", "an empty list", "Name at least one source.")])
    if document_length is not None and all(name != RANDOM for name, _ in mix):
        raise ValueError(f"document_length is for the source '{RANDOM}' only")
    folder = Path(cache).expanduser() if cache is not None else default_folder()
    found = {name: find_source(name, text_field) for name, _ in mix if name != RANDOM}

    size = bpe_size(tokenizer)
    if size is not None:
        _check_vocabulary(tokenizer, size, vocab_size)
        if not found:
            raise BadInput(
                [Problem("data.tokenizer", f"'{tokenizer}' has no text to train on in '{RANDOM}'")]
            )
        opened: Tokenizer = open_bpe(list(found.values()), size, folder, progress)
    else:
        opened = open_tokenizer(tokenizer)
    if found:
        _check_vocabulary(tokenizer, opened.vocab_size, vocab_size)

    def open_part(name: str, weight: float) -> Part:
        if name == RANDOM:
            seen, unseen = key_of(seed, "tokens"), key_of("held-out tokens")
            return Part(
                name,
                weight,
                RandomTokens(seen, seq_len, vocab_size, document_length),
                RandomTokens(unseen, seq_len, vocab_size, document_length),
                None,
            )
        tokens = open_cache(found[name], opened, folder, workers, progress, closely)
        train, held = split(tokens.offsets, heldout)
        return Part(
            name,
            weight,
            Windows(tokens.tokens, train, seq_len),
            Windows(tokens.tokens, held, seq_len),
            tokens,
        )

    parts = tuple(open_part(name, weight) for name, weight in mix)
    refuse(_too_little("to train on", parts, seq_len))
    return Corpus(
        parts,
        opened,
        Order([len(part.train) for part in parts], [weight for _, weight in mix], seed),
        separate_documents and any(part.train.has_boundaries for part in parts),
        seq_len,
    )


def _check_vocabulary(tokenizer: str, symbols: int, vocab_size: int) -> None:
    if symbols > vocab_size:
        raise BadInput(
            [
                Problem(
                    "data.tokenizer",
                    f"'{tokenizer}' has {symbols} symbols, the model's vocabulary only {vocab_size}",
                    f"Set model.vocab_size to {symbols} or more, or take a smaller tokenizer.",
                )
            ]
        )


def _too_little(what: str, parts: Sequence[Part], seq_len: int) -> list[Problem]:
    """A problem for each source that has not one sequence on this side of the split."""
    problems = []
    for part in parts:
        side = part.heldout if what == "held out" else part.train
        if isinstance(side, Windows) and len(side) == 0:
            problems.append(
                Problem(
                    "data.source",
                    f"'{part.name}' has {side.stream_length} tokens {what}, one sequence needs {seq_len + 1}",
                    "Add data, lower training.seq_len, or change data.heldout.",
                )
            )
    return problems


def _describe(part: Part) -> dict[str, Any]:
    described: dict[str, Any] = {"source": part.name, "weight": part.weight}
    if part.cache is None:
        empty = (
            "documents",
            "tokens",
            "windows",
            "heldout_windows",
            "text_bytes",
            "bytes_per_token",
            "cache",
        )
        return {**described, **dict.fromkeys(empty)}
    cache = part.cache
    return {
        **described,
        "documents": len(cache.offsets) - 1,
        "tokens": len(cache.tokens),
        "windows": len(part.train),
        "heldout_windows": len(part.heldout),
        "text_bytes": cache.text_bytes,
        "bytes_per_token": _ratio(cache.text_bytes, len(cache.tokens)),
        "cache": str(cache.folder),
    }


def _ratio(above: int | None, below: int | None) -> float | None:
    return above / below if above and below else None
