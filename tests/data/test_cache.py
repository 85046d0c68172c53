"""The cache on disk: built once, whole or not at all, whoever asks and whoever is killed."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.cache import TokenCache, default_folder, open_bpe, open_cache
from fivefold.data.damage import damage
from fivefold.data.documents import Piece, pieces_of
from fivefold.data.once import build_once
from fivefold.data.sources import find_source
from fivefold.data.tokenise import tasks_of
from fivefold.data.tokenizer import ByteTokenizer
from fivefold.data.workers import tokenise_all
from fivefold.problems import BadInput

OPEN = """
import hashlib, os, sys, time
from pathlib import Path
from fivefold.data import cache
from fivefold.data.sources import find_source
from fivefold.data.tokenise import tasks_of
from fivefold.data.tokenizer import ByteTokenizer

build = cache._build
def counted(*arguments):
    print("built", flush=True)
    build(*arguments)
cache._build = counted

source, folder, start = sys.argv[1:]
print("ready", flush=True)
while not os.path.exists(start):
    time.sleep(0.001)
opened = cache.open_cache(find_source(source, "text"), ByteTokenizer(), Path(folder), 2, False)
print(hashlib.sha256(opened.tokens.tobytes()).hexdigest(), flush=True)
"""


def open_text(path: Path, folder: Path) -> TokenCache:
    return open_cache(find_source(str(path), "text"), ByteTokenizer(), folder, 2, progress=False)


def start(source: Path, folder: Path, go: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, str(source), str(folder), str(go)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB, more than is tokenised without workers."""
    path = tmp_path_factory.mktemp("large") / "lines.jsonl"
    texts = (f"{number}: all work and no play " * 50 for number in range(15_000))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in {"a": "one", "b": "", "c": "drei ü"}.items():
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


def test_documents_end_with_the_end_token(small: Path, tmp_path: Path) -> None:
    cache = open_text(small, tmp_path / "cache")
    assert cache.tokens.tolist() == [*b"one", 256, *"drei ü".encode(), 256]
    assert cache.offsets.tolist() == [0, 4, 12]
    assert cache.text_bytes == 10
    assert cache.tokens.dtype == np.uint16


def test_a_large_vocabulary_is_stored_in_four_bytes(small: Path, tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 65_537
        end = 65_536
        fingerprint = "wide"

    cache = open_cache(find_source(str(small), "text"), Wide(), tmp_path / "cache", 1, progress=False)
    assert cache.tokens.dtype == np.uint32
    assert cache.tokens[3] == 65_536


def test_the_second_time_nothing_is_built(small: Path, tmp_path: Path) -> None:
    first = open_text(small, tmp_path / "cache")
    written = (first.folder / "tokens.bin").stat().st_mtime_ns
    again = open_text(small, tmp_path / "cache")
    assert again.folder == first.folder
    assert (again.folder / "tokens.bin").stat().st_mtime_ns == written


def test_another_tokenizer_is_another_cache(small: Path, tmp_path: Path) -> None:
    first, source = open_text(small, tmp_path / "cache"), find_source(str(small), "text")
    sizes = [open_bpe([source], size, tmp_path / "cache", progress=False) for size in (258, 260)]
    assert [tokenizer.vocab_size for tokenizer in sizes] == [258, 260]
    for tokenizer in sizes:
        cache = open_cache(source, tokenizer, tmp_path / "cache", 1, progress=False)
        assert cache.tokens[: cache.offsets[1] - 1].tolist() == tokenizer.encode("one").tolist()
    assert open_text(small, tmp_path / "cache").tokens.tolist() == first.tokens.tolist()


def test_other_content_is_another_cache(small: Path, tmp_path: Path) -> None:
    first = open_text(small, tmp_path / "cache")
    (small / "a").write_text("two")
    second = open_text(small, tmp_path / "cache")
    assert second.folder != first.folder
    assert second.tokens[:3].tolist() == [*b"two"]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json"])
@pytest.mark.parametrize("harm", ["truncated", "gone"])
def test_a_damaged_cache_is_built_again(small: Path, tmp_path: Path, name: str, harm: str) -> None:
    cache = open_text(small, tmp_path / "cache")
    expected = cache.tokens.tolist()
    file = cache.folder / name
    if harm == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 3)
    again = open_text(small, tmp_path / "cache")
    assert again.tokens.tolist() == expected
    assert again.offsets.tolist() == [0, 4, 12]


def test_processes_give_what_one_process_gives(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.documents.PIECE_BYTES", 1 << 20)
    tasks = [[piece] for piece in pieces_of(large, "text")]
    assert len(tasks) > 15
    alone = list(tokenise_all(tasks, ByteTokenizer(), 1))
    together = list(tokenise_all(tasks, ByteTokenizer(), 3))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.lengths, other.lengths)
        assert one.text_bytes == other.text_bytes


def test_bad_input_found_by_a_worker_is_told_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 1}\n')
    tasks = [pieces_of(tmp_path / "a.jsonl", "text")]
    with pytest.raises(BadInput, match=r"a.jsonl:2: field 'text' must be a string, not a number"):
        list(tokenise_all(tasks * 3, ByteTokenizer(), 2))


class Deadly(ByteTokenizer):
    def encode(self, text: str) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(RuntimeError, match=r"died \(exit code -9\)"):
        list(tokenise_all([pieces_of(tmp_path / "a.txt", "text")] * 3, Deadly(), 2))


def test_a_worker_ends_with_its_input() -> None:
    worker = subprocess.Popen([sys.executable, "-m", "fivefold.data.workers"], stdin=subprocess.PIPE)
    assert worker.stdin is not None
    pickle.dump(ByteTokenizer(), worker.stdin)
    worker.stdin.close()
    assert worker.wait(timeout=100) == 0


def test_processes_that_race_build_once(large: Path, tmp_path: Path) -> None:
    racers = [start(large, tmp_path / "cache", tmp_path / "go") for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    said = [racer.communicate(timeout=200)[0].split() for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(words.count("built") for words in said) == 1
    assert len({words[-1] for words in said}) == 1
    assert list((tmp_path / "cache").glob("*.partial*")) == []


def test_a_build_killed_halfway_leaves_nothing_that_counts(large: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (tmp_path / "go").touch()
    builder = start(large, folder, tmp_path / "go")
    while not any(file.stat().st_size for file in folder.glob("*.partial*/tokens.bin")):
        assert builder.poll() is None, "the build was over before it could be killed"
        time.sleep(0.001)
    lists = Path(f"/proc/{builder.pid}/task").glob("*/children")
    workers = [int(pid) for children in lists for pid in children.read_text().split()]
    builder.kill()
    builder.wait()
    assert list(folder.glob("*.partial*"))
    assert not [path for path in folder.iterdir() if path.is_dir() and "partial" not in path.name]

    cache = open_text(large, folder)
    assert len(cache.offsets) == 15_001
    assert cache.offsets[-1] == len(cache.tokens) == cache.text_bytes + 15_000
    last = cache.tokens[cache.offsets[-2] :]
    assert ByteTokenizer().decode(last) == "14999: all work and no play " * 50
    assert list(folder.glob("*.partial*")) == []
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    """Whether a process is still there some seconds from now at the latest (a zombie is not)."""
    for _ in range(400):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.05)
    return True


def test_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(BadInput, match=r"holds no text\n    Files read: 2, all empty."):
        open_text(tmp_path, tmp_path / ".cache")
    assert list((tmp_path / ".cache").glob("*.partial*")) == []


def test_a_source_that_changes_while_it_is_read(small: Path, tmp_path: Path) -> None:
    class Meddling(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            (small / "c").write_text("changed")
            return super().encode(text)

    with pytest.raises(BadInput, match="changed while it was read"):
        open_cache(find_source(str(small), "text"), Meddling(), tmp_path / "cache", 1, progress=False)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_a_cache_folder_that_cannot_be_used(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match=r"data.cache: .*file cannot be used: File exists"):
        open_text(small, tmp_path / "file")

    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BadInput, match=r"data.cache: .* cannot be used: No space left on device"):
        build_once(tmp_path / "cache" / "a", lambda folder: False, full)


def test_bpe_is_trained_once_and_again_when_damaged(small: Path, tmp_path: Path) -> None:
    source = find_source(str(small), "text")
    first = open_bpe([source], 260, tmp_path / "cache", progress=False)
    (file,) = (tmp_path / "cache").glob("bpe-*/tokenizer.json")
    written = file.stat().st_mtime_ns
    assert open_bpe([source], 260, tmp_path / "cache", progress=False).fingerprint == first.fingerprint
    assert file.stat().st_mtime_ns == written
    os.truncate(file, 100)
    assert open_bpe([source], 260, tmp_path / "cache", progress=False).fingerprint == first.fingerprint


def test_tasks_hold_every_piece_in_order(tmp_path: Path) -> None:
    pieces = [
        Piece(tmp_path / str(i), "text", 0, 1, size)
        for i, size in enumerate([1, 9 << 20, 2 << 20, 3 << 20, 5])
    ]
    assert tasks_of(pieces) == [pieces[:2], pieces[2:4], pieces[4:]]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json"])
def test_a_flipped_bit_is_noticed_said_and_built_again(
    small: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = open_text(small, tmp_path / "cache")
    expected, file = cache.tokens.tolist(), cache.folder / name
    whole = file.read_bytes()
    open_text(small, tmp_path / "cache")
    assert capfd.readouterr().err == ""
    for place in range(0, len(whole), max(1, len(whole) // 16)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        again = open_text(small, tmp_path / "cache")
        assert again.tokens.tolist() == expected
        assert again.offsets.tolist() == [0, 4, 12]
        told = capfd.readouterr().err
        assert f"{name} is not what was written. It is built again." in told


def test_of_a_large_file_some_chunks_are_compared_other_ones_each_time(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.data.damage.CHUNK", 4)
    monkeypatch.setattr("fivefold.data.damage.CHECKED_BYTES", 8)
    folder = open_text(small, tmp_path / "cache").folder
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[9] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    found = {damage(folder, closely=True) for _ in range(200)}
    assert found == {None, "tokens.bin is not what was written"}
    assert damage(folder, closely=False) is None


def test_the_cache_is_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "fivefold"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_folder() == Path("~/.cache/fivefold").expanduser()
