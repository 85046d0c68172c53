"""The front door, from settings to batches."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.data.batch import Batch
from fivefold.data.corpus import Corpus, open_corpus
from fivefold.data.loader import Loader
from fivefold.problems import BadInput


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """40 documents, each of one letter that is its own."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(letter(i) * 20 * (i + 1))
    return folder


def letter(document: int) -> str:
    return chr(ord("0") + document)


def corpus(source: Any, cache: Path, **settings: Any) -> Corpus:
    return open_corpus(source, **{"seq_len": 16, "vocab_size": 300, "cache": cache, **settings})


def first(loader: Loader, steps: int = 1) -> list[Batch]:
    with loader:
        return [batch for _ in range(steps) for batch in next(loader)]


def test_an_epoch_is_all_the_documents_that_are_not_held_out(texts: Path, tmp_path: Path) -> None:
    opened = corpus(str(texts), tmp_path / "cache", heldout=0.2, separate_documents=False)
    described = opened.describe()

    def predicted(loader: Loader, windows: int) -> Counter[str]:
        batches = first(loader, windows)
        return Counter(chr(token) for batch in batches for token in batch.targets.flatten().tolist())

    trained = predicted(opened.train_loader(1, 1), described["windows"])
    held = predicted(opened.heldout_loader(1, 1), described["heldout_windows"])
    whole = Counter({letter(i): 20 * (i + 1) for i in range(40)}) + Counter({chr(256): 40})
    assert len(held) > 4
    assert set(trained) & set(held) == {chr(256)}
    # Of each side's stream, the first token is never predicted and less than a window is left over.
    assert trained + held <= whole
    assert (whole - trained - held).total() <= 2 * 16


def test_describe(texts: Path, tmp_path: Path) -> None:
    described = corpus(str(texts), tmp_path / "cache").describe()
    size = sum(file.stat().st_size for file in texts.iterdir())
    assert described["documents"] == 40
    assert described["text_bytes"] == size
    assert described["tokens"] == size + 40
    assert described["bytes_per_token"] == size / (size + 40)
    assert described["sources"][0]["source"] == str(texts)
    assert described["windows"] + described["heldout_windows"] <= (size + 40) // 16
    assert open_corpus("random", seq_len=4, vocab_size=9).describe()["tokens"] is None


def test_the_seed_changes_training_order_and_not_what_is_held_out(texts: Path, tmp_path: Path) -> None:
    one, other = (corpus(str(texts), tmp_path / "cache", heldout=0.3, seed=seed) for seed in (0, 1))
    trained = [first(opened.train_loader(8, 8))[0].tokens for opened in (one, other)]
    held = [first(opened.heldout_loader(8, 8))[0].tokens for opened in (one, other)]
    assert not torch.equal(*trained)
    assert torch.equal(*held)
    assert torch.equal(held[0], first(one.heldout_loader(8, 8))[0].tokens)


def test_held_out_data_goes_round(texts: Path, tmp_path: Path) -> None:
    opened = corpus(str(texts), tmp_path / "cache")
    windows = opened.describe()["heldout_windows"]
    rows = [tuple(batch.tokens[0].tolist()) for batch in first(opened.heldout_loader(1, 1), 2 * windows)]
    assert sorted(rows[:windows]) == sorted(rows[windows:])


def test_documents_together(texts: Path, tmp_path: Path) -> None:
    (batch,) = first(corpus(str(texts), tmp_path / "cache", separate_documents=False).train_loader(8, 8))
    assert batch.documents is None
    assert batch.valid == 8 * 16


def test_random() -> None:
    opened = open_corpus("random", seq_len=16, vocab_size=50)
    (batch,) = first(opened.train_loader(8, 8))
    assert batch.documents is None
    assert batch.valid == 8 * 16
    assert int(batch.tokens.max()) < 50
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    (part,) = opened.parts
    assert part.train.sample(0).tokens.tolist() != part.heldout.sample(0).tokens.tolist()
    other = open_corpus("random", seq_len=16, vocab_size=50, seed=1)
    assert part.train.sample(0).tokens.tolist() != other.parts[0].train.sample(0).tokens.tolist()
    assert part.heldout.sample(0).tokens.tolist() == other.parts[0].heldout.sample(0).tokens.tolist()


def test_random_in_documents() -> None:
    (batch,) = first(open_corpus("random", seq_len=64, vocab_size=50, document_length=8).train_loader(8, 8))
    assert batch.documents is not None
    boundaries = int((batch.documents[:, 1:] != batch.documents[:, :-1]).sum())
    assert boundaries > 20
    assert 0 <= 8 * 64 - batch.valid - boundaries <= 8  # a document may end with the sequence


def test_document_length_is_for_random_only(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="document_length"):
        corpus(str(texts), tmp_path / "cache", document_length=8)


def test_a_mix_by_weight(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("~" * 2000)
    opened = corpus([(str(texts), 3.0), (str(tmp_path / "other.txt"), 1.0)], tmp_path / "cache")
    (batch,) = first(opened.train_loader(80, 80))
    assert int((batch.tokens == ord("~")).all(dim=1).sum()) == 20
    (held,) = first(opened.heldout_loader(80, 80))
    assert int((held.tokens == ord("~")).all(dim=1).sum()) >= 15


def test_text_mixed_with_random_keeps_documents(texts: Path, tmp_path: Path) -> None:
    opened = corpus([(str(texts), 1.0), ("random", 1.0)], tmp_path / "cache")
    for batch in first(opened.train_loader(4, 1), 3):
        assert batch.documents is not None


def test_one_single_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 3601 + "b" * 399)
    opened = corpus(str(tmp_path / "one.txt"), tmp_path / "cache", heldout=0.1)
    described = opened.describe()
    assert described["windows"] == (3601 - 1) // 16
    assert described["heldout_windows"] == (400 - 1) // 16
    for loader, token in ((opened.train_loader(50, 50), "a"), (opened.heldout_loader(24, 24), "b")):
        (batch,) = first(loader)
        assert (batch.tokens == ord(token)).all()


def test_bpe_over_a_mix(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("something else altogether " * 50)
    opened = corpus(
        [(str(texts), 1.0), (str(tmp_path / "other.txt"), 1.0)], tmp_path / "cache", tokenizer="bpe-270"
    )
    assert opened.tokenizer.vocab_size == 270
    assert opened.describe()["bytes_per_token"] > 1.2
    (batch,) = first(opened.train_loader(8, 8))
    assert int(batch.tokens.max()) < 270


def test_stdlib(tmp_path: Path) -> None:
    opened = open_corpus("stdlib", seq_len=256, vocab_size=320, cache=tmp_path)
    described = opened.describe()
    assert described["documents"] > 200
    assert described["heldout_windows"] > 100
    assert described["tokens"] == described["text_bytes"] + described["documents"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"vocab_size": 256},
            r"data.tokenizer: 'bytes' has 257 symbols, the model's .* only 256\n.*model.vocab_size to 257",
        ),
        ({"tokenizer": "bpe-4096"}, r"data.tokenizer: 'bpe-4096' has 4096 symbols, .* only 300"),
        ({"tokenizer": "nowhere.json"}, r"data.tokenizer: 'nowhere.json' is neither known nor a file"),
        (
            {"seq_len": 100_000},
            r"data.source: .* tokens to train on, one sequence needs 100001\n.*training.seq_len",
        ),
    ],
)
def test_refused(texts: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        corpus(str(texts), tmp_path / "cache", **settings)


def test_too_little_held_out_is_said_before_the_first_validation(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 500)
    opened = corpus(str(tmp_path / "one.txt"), tmp_path / "cache")
    with pytest.raises(BadInput, match=r"has 10 tokens held out, one sequence needs 17"):
        opened.heldout_loader(1, 1)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Name at least one source"):
        corpus([], tmp_path)
    with pytest.raises(BadInput, match="'bpe-270' has no text to train on in 'random'"):
        corpus("random", tmp_path, tokenizer="bpe-270")
