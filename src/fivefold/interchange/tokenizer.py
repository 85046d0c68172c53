"""The tokenizer that a run is trained with: kept in its folder, and written out with its weights.

RUN/tokenizer/tokenizer.json, ...   as `transformers` reads them; not for `bytes`, which needs no file
"""

import json
from pathlib import Path

from fivefold.data.tokenizer import END_NAMES, ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer
from fivefold.interchange.kept import FOLDER, TOKENIZER_FILES, has_tokenizer

KEPT = "tokenizer"
FILE, CONFIG = TOKENIZER_FILES[:2]


def keep_tokenizer(name: str, tokenizer: Tokenizer, run: Path) -> None:
    """Keep a tokenizer with a run; `name` is `data.tokenizer`, a file or folder, or `bpe-N`."""
    if not isinstance(tokenizer, FileTokenizer):
        return
    kept = run / KEPT
    kept.mkdir(exist_ok=True)
    (kept / FILE).write_text(tokenizer.as_file(), encoding="utf-8")
    given = Path(name).expanduser()
    beside = given if given.is_dir() else given.parent
    if given.exists():
        _copied(beside, kept, TOKENIZER_FILES[1:])
    else:
        _describe(kept, END_NAMES[0])


def write_tokenizer(name: str, vocab_size: int, run: Path, out: Path) -> tuple[int | None, list[str]]:
    """Write a run's tokenizer; the id that ends a document, and the files. (None, []) where there is none.

    One that was never used, with more symbols than the model has, is none.
    """
    for kept in (run / KEPT, run / FOLDER):
        if has_tokenizer(kept):
            return open_tokenizer(str(kept)).end, _copied(kept, out, TOKENIZER_FILES)
    if name != "bytes" or ByteTokenizer.vocab_size > vocab_size:
        return None, []
    (out / FILE).write_text(_bytes_as_file(), encoding="utf-8")
    _describe(out, END_NAMES[0])
    return ByteTokenizer.end, [FILE, CONFIG]


def _copied(source: Path, target: Path, names: tuple[str, ...]) -> list[str]:
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        (target / name).write_bytes((source / name).read_bytes())
    return there


def _bytes_as_file() -> str:
    """The tokenizer `bytes` as a byte-level BPE without merges: each byte is its own number."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    numbers = {symbol: byte for byte, symbol in _symbols().items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(numbers, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_NAMES[0]])
    text: str = tokenizer.to_str()
    return text


def _symbols() -> dict[int, str]:
    """The character by which a byte-level tokenizer writes each byte: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _describe(folder: Path, end: str) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
