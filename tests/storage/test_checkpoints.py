"""Checkpoints are whole or absent; a damaged one is named and passed over; nothing in one is executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.problems import BadInput
from fivefold.storage.folder import begin, commit, durable, newest_first, prune, saved_steps, verified
from fivefold.storage.lock import LOCK, locked
from fivefold.storage.manifest import COMMIT, MANIFEST, DamagedError, commit_text, read_manifest
from fivefold.storage.safetensors import CHUNK, file_checksum, read_header, write
from fivefold.training.build import Built, build
from fivefold.training.checkpoint import Progress, Saver, load_latest
from tests.cases import SPEC, Case, save

RUNNER = CliRunner()
FILES = ("rank-00000.safetensors", MANIFEST, COMMIT)


def small() -> Built:
    return build(Case("small", spec=SPEC | {"layers": 1}).job(), torch.device("cpu"))


def filled(built: Built, value: float) -> Built:
    with torch.no_grad():
        for master in built.weights.masters:
            master.fill_(value)
    return built


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(filled(small(), step), folder, Progress(step, 100 * step, loss=2.5), keep=2)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2, whose weights are all 1 and all 2."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


# --- damage ------------------------------------------------------------------------------------------------


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    shutil.copy(other, path)


DAMAGES: tuple[Callable[[Path, Path], None], ...] = (truncate, flip, delete, swap)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    run: Path, name: str, damage: Callable[[Path, Path], None]
) -> None:
    older, newer = run / "checkpoints" / "step-1", run / "checkpoints" / "step-2"
    damage(newer / name, older / name)
    with pytest.raises(DamagedError):
        verified(newer)
    built = small()
    progress, problems = load_latest(built, run)
    assert progress == Progress(1, 100, loss=2.5)
    assert len(problems) == 1
    assert str(newer) in problems[0]
    assert name in problems[0] or MANIFEST in problems[0]
    assert all(torch.equal(master, torch.ones_like(master)) for master in built.weights.masters)
    told = RUNNER.invoke(app, ["checkpoint", "verify", str(run), "--json"])
    assert told.exit_code == 1
    assert list(json.loads(told.stdout)["damaged"]) == ["step-2"]


def test_all_files_of_another_step_are_no_checkpoint_of_this_one(run: Path) -> None:
    older, newer = run / "checkpoints" / "step-1", run / "checkpoints" / "step-2"
    for name in FILES:
        shutil.copy(older / name, newer / name)
    with pytest.raises(DamagedError, match="step 1"):
        verified(newer)


def test_where_all_are_damaged_nothing_is_begun_anew(run: Path) -> None:
    for folder in newest_first(run):
        (folder / COMMIT).unlink()
    with pytest.raises(BadInput) as caught:
        load_latest(small(), run)
    assert len(caught.value.problems) == 2


def mutations(text: bytes, count: int) -> Iterator[bytes]:
    draw = random.Random(7)
    for _ in range(count):
        content = bytearray(text)
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(len(content))
            kind = draw.randrange(4)
            if kind == 0:
                content[place] ^= 1 << draw.randrange(8)
            elif kind == 1:
                content[place] = draw.choice(b'0123456789-.{}[]",:eEnull')
            elif kind == 2:
                del content[place : place + draw.randrange(1, 9)]
            else:
                content[place:place] = draw.choice((b"9" * 40, b'"', b"{", b"[" * 5, b"-1", b"null", b"../x"))
        yield bytes(content)


def test_no_mutation_of_a_manifest_is_loaded_or_raises_anything_else(run: Path) -> None:
    """As it was damaged; and with a commit that was made to fit, which is another manifest or none."""
    folder = run / "checkpoints" / "step-2"
    text, commit = (folder / MANIFEST).read_bytes(), (folder / COMMIT).read_bytes()
    for content in mutations(text, 200):
        (folder / MANIFEST).write_bytes(content)
        (folder / COMMIT).write_bytes(commit)
        if content != text:
            with pytest.raises(DamagedError):
                read_manifest(folder)
        (folder / COMMIT).write_bytes(commit_text(content))
        try:
            found = verified(folder)
        except DamagedError:
            continue
        assert {piece.file for tensor in found.tensors.values() for piece in tensor.pieces} <= set(FILES)


SOME = "model.head.norm.weight"
CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a piece is missing": lambda m: m["tensors"][SOME]["pieces"].clear(),
    "a piece is there twice": lambda m: m["tensors"][SOME]["pieces"].append(m["tensors"][SOME]["pieces"][0]),
    "a piece is outside": lambda m: m["tensors"][SOME]["pieces"][0].update(start=[1]),
    "a piece is behind its file": lambda m: m["tensors"][SOME]["pieces"][0].update(offset=10**9),
    "a piece is in no file": lambda m: m["tensors"][SOME]["pieces"][0].update(file="rank-00001.safetensors"),
    "a piece is half a tensor": lambda m: m["tensors"][SOME].update(shape=[64]),
    "a file is elsewhere": lambda m: m["files"].update({"../../secret": {"bytes": 1, "checksum": ""}}),
    "a dtype is not known": lambda m: m["tensors"][SOME].update(dtype="F65"),
    "it is of another step": lambda m: m.update(step=1),
    "it says what nobody asks": lambda m: m.update(run="rm -r /"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_damaged_though_committed(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step-2"
    content = json.loads((folder / MANIFEST).read_text())
    CONTRADICTIONS[name](content)
    (folder / MANIFEST).write_text(json.dumps(content))
    (folder / COMMIT).write_bytes(commit_text((folder / MANIFEST).read_bytes()))
    with pytest.raises(DamagedError):
        read_manifest(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


def test_a_pickle_in_place_of_a_checkpoint_is_not_opened(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    folder = run / "checkpoints" / "step-3"
    folder.mkdir()
    for name in (".metadata", *FILES):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    progress, problems = load_latest(small(), run)
    assert progress is not None
    assert progress.step == 2
    assert "step-3" in problems[0]
    assert not (run / "exploded").exists()


# --- what is written ---------------------------------------------------------------------------------------


def test_what_is_saved_is_what_was_there_when_it_was_saved(tmp_path: Path) -> None:
    """Training goes on while it is written."""
    built = filled(small(), 1)
    saver = Saver(built, tmp_path, keep=2)
    saver.save(Progress(1, 100))
    filled(built, 2)
    saver.save(Progress(2, 200))
    filled(built, 3)
    saver.wait()
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        manifest = verified(folder)
        stored = read_header(folder / FILES[0])
        assert manifest.step == step
        whole = (folder / FILES[0]).read_bytes()
        for name, tensor in stored.items():
            if name.startswith("model."):
                content = torch.frombuffer(
                    bytearray(whole[tensor.offset : tensor.offset + tensor.bytes]), dtype=torch.float64
                )
                assert torch.equal(content, torch.full_like(content, step))
    assert [(each.step, each.problem) for each in saver.outcomes] == [(1, None), (2, None)]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-2\n"


def test_files_can_be_read_by_others(run: Path) -> None:
    """They are safetensors files, and sha256sum can tell whether a manifest is the one that was committed."""
    safetensors = pytest.importorskip("safetensors")
    folder = run / "checkpoints" / "step-2"
    with safetensors.safe_open(folder / FILES[0], framework="pt") as file:
        names = set(file.keys())
        assert names == set(read_header(folder / FILES[0]))
        some = next(name for name in sorted(names) if name.startswith("model."))
        assert torch.equal(file.get_tensor(some), torch.full_like(file.get_tensor(some), 2))
    subprocess.run(["sha256sum", "--check", COMMIT], cwd=folder, check=True, capture_output=True)
    whole = (folder / FILES[0]).read_bytes()
    assert len(whole) < CHUNK
    by_hand = sha256(sha256(whole).digest()).hexdigest()
    assert by_hand == read_manifest(folder).files[FILES[0]].checksum


def test_a_step_is_saved_again_after_an_older_one_was_taken_up(run: Path) -> None:
    save(filled(small(), 5), run, Progress(2, 200, loss=3.5), keep=2)
    built = small()
    assert load_latest(built, run)[0] == Progress(2, 200, loss=3.5)
    assert float(built.weights.masters[0].detach().flatten()[0]) == 5
    assert saved_steps(run) == [1, 2]


@pytest.mark.parametrize("step", [2, 3])
def test_a_commit_that_fails_at_any_moment_leaves_whole_checkpoints(
    run: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the first, second, ... small file: of a new step, and of one once more."""
    before = verified(run / "checkpoints" / "step-2")
    manifest = before.model_copy(update={"step": step, "job": "another"})
    for failing in range(1, 10):
        partial, left = begin(run, step), failing
        shutil.copy(run / "checkpoints" / "step-2" / FILES[0], partial)

        def refuse(path: Path, content: bytes) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(errno.ENOSPC, "no room")
            durable(path, content)

        monkeypatch.setattr("fivefold.storage.folder.durable", refuse)
        try:
            commit(run, manifest)
            break
        except OSError:
            assert {verified(each).job for each in newest_first(run)} <= {before.job, manifest.job}
            assert saved_steps(run)[:2] == [1, 2]
        finally:
            monkeypatch.setattr("fivefold.storage.folder.durable", durable)
    assert failing > 3
    assert verified(run / "checkpoints" / f"step-{step}") == manifest
    assert (run / "checkpoints" / "latest").read_text() == f"step-{step}\n"


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(1, 0, [6]), (2, 0, [5, 6]), (1, 2, [2, 4, 6]), (2, 5, [5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)
def test_the_newest_and_every_nth_stay(tmp_path: Path, keep: int, every: int, left: list[int]) -> None:
    for step in range(1, 7):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    prune(tmp_path, keep, every)
    assert saved_steps(tmp_path) == left


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    """A small file system of its own; the run is told what is needed and what is there."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a file system")
    try:
        built = filled(small(), 1)
        saver = Saver(built, tmp_path, keep=9)
        for step in range(1, 9):
            saver.save(Progress(step, 100 * step))
            saver.wait()
            if saver.outcomes[-1].problem:
                break
        problem = saver.outcomes[-1].problem
        assert problem is not None
        assert "the disk is full" in problem
        assert "bytes are needed" in problem
        good = [each.step for each in saver.outcomes[:-1]]
        assert saved_steps(tmp_path) == good
        assert good
        assert not list((tmp_path / "checkpoints").glob("*.partial"))
        assert all(verified(folder) for folder in newest_first(tmp_path))
        (tmp_path / "checkpoints" / "step-1").rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")
        saver.save(Progress(9, 900))
        saver.wait()
        assert saver.outcomes[-1].problem is None
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize(
    "sizes", [[], [0], [CHUNK], [CHUNK - 3, 5], [7, 2 * CHUNK + 1, 0, CHUNK - 8], [1] * 50]
)
def test_a_file_s_checksum_is_that_of_its_chunks_however_it_was_written(
    tmp_path: Path, sizes: list[int]
) -> None:
    draw = random.Random(3)
    contents = [memoryview(draw.randbytes(size)) for size in sizes]
    size, checksum = write(tmp_path / "file", b"header", contents)
    whole = (tmp_path / "file").read_bytes()
    assert whole == b"header" + b"".join(contents)
    assert size == len(whole)
    digests = [sha256(whole[start : start + CHUNK]).digest() for start in range(0, len(whole), CHUNK)]
    assert checksum == file_checksum(tmp_path / "file") == sha256(b"".join(digests)).hexdigest()


# --- the run's folder --------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_and_the_first_not_disturbed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from fivefold.storage.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        before = (tmp_path / LOCK).read_bytes()
        with pytest.raises(BadInput) as caught, locked(tmp_path):
            pass
        assert str(owner.pid) in caught.value.problems[0].message
        assert os.uname().nodename in caught.value.problems[0].message
        assert (tmp_path / LOCK).read_bytes() == before
        owner.kill()
        owner.wait()
    with locked(tmp_path):  # a dead owner's lock is taken over
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_of_runs_that_start_together_one_has_the_folder(tmp_path: Path) -> None:
    """Each takes it again and again; inside it alone may make a file."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from fivefold.storage.lock import locked; from fivefold.problems import BadInput\n"
        "run, held = Path(sys.argv[1]), 0\n"
        "while held < 40:\n"
        "    try:\n"
        "        with locked(run):\n"
        "            os.close(os.open(run / 'mine', os.O_CREAT | os.O_EXCL))\n"
        "            time.sleep(0.001); (run / 'mine').unlink(); held += 1\n"
        "    except BadInput: time.sleep(0.0005)"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [run.wait(timeout=60) for run in runs] == [0] * 4


def test_what_a_job_left_behind_on_a_lost_host_is_its_own(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"pid": 7, "host": "lost", "launch": "torchrun big"}')
    for other in (None, "torchrun small"):
        with pytest.raises(BadInput, match="process 7 on lost"), locked(tmp_path, other):
            pass
    with locked(tmp_path, "torchrun big"):
        assert json.loads((tmp_path / LOCK).read_text())["launch"] == "torchrun big"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "host": 3}'])
def test_a_lock_that_says_nothing_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    if "host" in content:
        with pytest.raises(BadInput), locked(tmp_path):
            pass
        return
    with locked(tmp_path):
        pass


# --- the command -------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_verified_and_removed(run: Path) -> None:
    listed = json.loads(RUNNER.invoke(app, ["checkpoint", "ls", str(run), "--json"]).stdout)
    assert [each["step"] for each in listed["checkpoints"]] == [1, 2]
    assert "step 2" in RUNNER.invoke(app, ["checkpoint", "ls", str(run)]).stdout
    assert RUNNER.invoke(app, ["checkpoint", "verify", str(run)]).stdout == "step-1: whole\nstep-2: whole\n"
    (run / "checkpoints" / "step-9.partial").mkdir()
    assert RUNNER.invoke(app, ["checkpoint", "prune", str(run), "--keep", "1"]).stdout == "removed: step 1\n"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-2"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["ls", "nowhere"], 2, "is not a folder"),
        (["ls", "."], 1, "has no checkpoint"),
        (["verify", "RUN", "--step", "7"], 2, "no checkpoint of step 7"),
        (["prune", "RUN", "--keep", "0"], 2, "--keep"),
    ],
)
def test_bad_input_is_said_in_a_line(
    run: Path, words: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run / "checkpoints")
    found = RUNNER.invoke(app, ["checkpoint", *(str(run) if word == "RUN" else word for word in words)])
    assert found.exit_code == code
    assert told in found.output
    assert "Traceback" not in found.output
