"""Tokenizers: text there and back, an end to every document, and files that cannot be used."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from fivefold.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    bpe_size,
    open_tokenizer,
    train_bpe,
)
from fivefold.problems import BadInput

TEXTS = [
    "the cat sat on the mat. " * 20,
    "a different thing, wholly different: the thing.\n" * 20,
    "äöü 😀 " * 9,
]

valid_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, 280, path, progress=False)
    return FileTokenizer(path)


def write(path: Path, vocabulary: dict[str, int], **config: object) -> Path:
    """A word-level tokenizer.json, as someone else may have made it."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path / "tokenizer.json"


@given(text=valid_text)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert tokenizer.end == 256
    assert tokenizer.vocab_size == 257


def test_bytes_decode_of_what_is_not_text() -> None:
    assert ByteTokenizer().decode(np.array([0xFF, 65, 256, 300])) == "\ufffdA"


@given(
    text=st.one_of(valid_text, st.lists(st.sampled_from(["<|endoftext|>", " ", "the", "\n"])).map("".join))
)
def test_bpe_round_trip_and_no_end_token_from_text(trained: FileTokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.end not in ids
    assert trained.decode([*ids, trained.end]) == text


def test_bpe_has_the_size_asked_for_and_compresses(trained: FileTokenizer) -> None:
    assert trained.vocab_size == 280
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_bpe_training_is_deterministic(trained: FileTokenizer, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from fivefold.data.tokenizer import train_bpe
train_bpe({TEXTS!r}, 280, Path({str(tmp_path / "again.json")!r}), progress=False)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert FileTokenizer(tmp_path / "again.json").fingerprint == trained.fingerprint


def test_bpe_of_too_little_text_is_smaller(tmp_path: Path) -> None:
    train_bpe(["ab"], 5000, tmp_path / "t.json", progress=False)
    assert FileTokenizer(tmp_path / "t.json").vocab_size < 300


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_a_copy_in_another_process_is_the_same(kind: str, trained: FileTokenizer) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else trained
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "the cat <|endoftext|> sat"
    assert copy.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert (copy.end, copy.vocab_size, copy.fingerprint) == (
        tokenizer.end,
        tokenizer.vocab_size,
        tokenizer.fingerprint,
    )


def test_truncation_and_padding_in_the_file_are_switched_off(trained: FileTokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(str(tmp_path))
    assert opened.encode("a a a a a").tolist() == [0] * 5
    assert opened.encode("a").tolist() == [0]


def test_nothing_is_put_before_a_document_whatever_the_file_asks_for(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": 0, "</s>": 1, "<s>": 2, "?": 3})
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 2), ("</s>", 1)])
    tokenizer.save(str(path))
    assert tokenizer.encode("a a").ids == [2, 0, 0, 1]
    assert FileTokenizer(path).encode("a a").tolist() == [0, 0]


def test_the_end_token(tmp_path: Path) -> None:
    assert FileTokenizer(write(tmp_path, {"a": 0, "</s>": 1, "?": 2})).end == 1
    assert FileTokenizer(write(tmp_path, {"a": 0, "</s>": 1, "<|endoftext|>": 2, "?": 3})).end == 2
    assert FileTokenizer(write(tmp_path, {"a": 0, "[STOP]": 1, "?": 2}, eos_token="[STOP]")).end == 1
    assert (
        FileTokenizer(write(tmp_path, {"a": 0, "[STOP]": 1, "?": 2}, eos_token={"content": "[STOP]"})).end
        == 1
    )


def test_no_end_token(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": 0, "?": 1}, eos_token="[GONE]")
    with pytest.raises(BadInput, match=r'no end-of-document token.*\n.*tokenizer_config.json.*"eos_token"'):
        FileTokenizer(path)
    path.with_name("tokenizer_config.json").write_text("{oops")
    with pytest.raises(BadInput, match=r"tokenizer_config.json is not JSON"):
        FileTokenizer(path)


def test_vocab_size_is_one_more_than_the_largest_id(tmp_path: Path) -> None:
    assert FileTokenizer(write(tmp_path, {"a": 0, "</s>": 999, "?": 1})).vocab_size == 1000


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    one = FileTokenizer(write(tmp_path, {"a": 0, "</s>": 1, "?": 2})).fingerprint
    other = FileTokenizer(write(tmp_path, {"a": 1, "</s>": 0, "?": 2})).fingerprint
    vocabulary = {"a": 0, "[STOP]": 1, "[END]": 2, "?": 3}
    ends = [FileTokenizer(write(tmp_path, vocabulary, eos_token=end)) for end in ("[STOP]", "[END]")]
    assert len({one, other, ByteTokenizer().fingerprint, *(each.fingerprint for each in ends)}) == 5


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"data.tokenizer: 'byte' is neither known nor a file\n    Allowed: bytes"
    ):
        open_tokenizer("byte")
    (tmp_path / "tokenizer.json").write_text('{"hello": 1}')
    with pytest.raises(BadInput, match=r"tokenizer.json is not a tokenizer.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"tokenizer.json is not a tokenizer.json"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))


def test_bpe_names() -> None:
    assert bpe_size("bpe-257") == 257
    assert bpe_size("bytes") is None
    for name in ("bpe-256", "bpe-", "bpe-4k", "bpe--5"):
        with pytest.raises(BadInput, match=rf"'{name}': N must be 257 or more"):
            bpe_size(name)
