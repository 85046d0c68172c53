"""Text to token ids and back.

Documents are told apart by an end token after each; nothing is put before them. Text that happens to
spell a special token, such as the end token's name, is encoded as the plain text it is.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.problems import BadInput, Problem

ALLOWED = "Allowed: bytes, a path to a tokenizer.json, or bpe-N with N from 257 on (trained on the source)."
SMALLEST_BPE = 257
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "<EOS>",
    "[EOS]",
)


class Tokenizer(Protocol):
    """What every tokenizer offers. All of them can be pickled."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end(self) -> int:
        """The id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that encode alike."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, [tokens], without an end token."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of some ids; end tokens are left out."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 as the end of a document."""

    vocab_size = 257
    end = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    The end token is the first of the usual names it knows, else the `eos_token` that a
    `tokenizer_config.json` beside it names. Truncation and padding set in the file are switched off:
    a document is encoded whole.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise BadInput(
                [Problem("data.tokenizer", f"{path} is not a tokenizer.json: {error}", ALLOWED)]
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end = _find_end(vocabulary, path)
        self.fingerprint = hashlib.blake2b(f"{self.end}\0{text}".encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(
            self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int64
        )

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        kept = [int(i) for i in ids if i != self.end]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    def as_file(self) -> str:
        """The contents of its tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": self._tokenizer.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import tokenizers

        self.__dict__.update(state, _tokenizer=tokenizers.Tokenizer.from_str(state["_tokenizer"]))
        self._tokenizer.encode_special_tokens = True


def bpe_size(name: str) -> int | None:
    """N of `bpe-N`, or None for another kind of tokenizer. Raises `BadInput` when N is no good."""
    if not name.startswith("bpe-") or Path(name).exists():
        return None
    number = name.removeprefix("bpe-")
    if not number.isdecimal() or int(number) < SMALLEST_BPE:
        raise BadInput(
            [
                Problem(
                    "data.tokenizer",
                    f"'{name}': N must be {SMALLEST_BPE} or more (256 bytes and the end of a document)",
                    "Such as bpe-4096.",
                )
            ]
        )
    return int(number)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes`, or that of a `tokenizer.json` (or of the folder it is in)."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise BadInput([Problem("data.tokenizer", f"'{name}' is neither known nor a file", ALLOWED)])
    return FileTokenizer(path)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path, progress: bool) -> None:
    """Train a byte-level BPE of `vocab_size` tokens, the end token among them, and write it to `path`.

    The same texts give the same file. Fewer tokens come out when the texts have no more pairs to merge.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _find_end(vocabulary: dict[str, int], path: Path) -> int:
    for name in END_NAMES:
        if name in vocabulary:
            return vocabulary[name]
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        named = _read_object(config).get("eos_token")
        eos = named.get("content") if isinstance(named, dict) else named
        if isinstance(eos, str) and eos in vocabulary:
            return vocabulary[eos]
    raise BadInput(
        [
            Problem(
                "data.tokenizer",
                f"{path} has no end-of-document token (looked for {', '.join(END_NAMES)})",
                f'Name one of its tokens in {config.name} beside it: {{"eos_token": "..."}}.',
            )
        ]
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput([Problem("data.tokenizer", f"{path} is not JSON: {error}")]) from None
    return found if isinstance(found, dict) else {}
