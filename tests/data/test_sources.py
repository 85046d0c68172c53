"""Sources: which files, which documents, and a plain word for everything that can be wrong with them."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.data import documents
from fivefold.data.documents import pieces_of, read
from fivefold.data.sources import Source, find_source
from fivefold.problems import BadInput


def texts(name: Path | str, text_field: str = "text") -> list[str]:
    source = find_source(str(name), text_field)
    return [text for piece in source.pieces() for text in read(piece)]


def refused(name: Path | str, text_field: str = "text") -> str:
    with pytest.raises(BadInput) as caught:
        texts(name, text_field)
    assert [problem.key for problem in caught.value.problems] == ["data.source"]
    return str(caught.value)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ["b.txt", "a.md", "sub/c.py", "sub/deep/d.rst", ".hidden", ".git/config", "__pycache__/e.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "empty.txt").write_text("")
    return root


def test_a_folder_is_every_file_below_it_in_order(tree: Path) -> None:
    assert texts(tree) == ["a.md", "b.txt", "sub/c.py", "sub/deep/d.rst"]


def test_globs(tree: Path) -> None:
    assert texts(tree / "*.txt") == ["b.txt"]
    assert texts(tree / "**" / "*.rst") == ["sub/deep/d.rst"]
    assert texts(tree / "s*") == ["sub/c.py", "sub/deep/d.rst"]
    assert texts(tree / "[ab]*") == ["a.md", "b.txt"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    assert texts(tmp_path / "a[1].txt") == ["brackets"]


def test_stdlib_is_real_text() -> None:
    source = find_source("stdlib", "text")
    names = {file.name for file in source.files}
    assert {"argparse.py", "threading.py"} <= names
    assert not any("site-packages" in str(file) or "__pycache__" in str(file) for file in source.files)
    assert sum(piece.bytes for piece in source.pieces()) > 5_000_000


def test_text_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one\r\ntwo\n"]


@given(
    lines=st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"])))),
    size=st.integers(1, 90),
)
@example(lines=["a", "b"], size=len('{"text": "a"}\n'))
def test_jsonl_is_the_same_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str | None], size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    with path.open("w", encoding="utf-8", newline="") as file:
        for line in lines:
            file.write("\n" if line is None else json.dumps({"text": line}, ensure_ascii=False) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", size)
        pieces = pieces_of(path, "text")
    assert sum(piece.bytes for piece in pieces) == path.stat().st_size
    assert [text for piece in pieces for text in read(piece)] == [line for line in lines if line]


def test_jsonl_by_another_field_and_without_a_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"body": "x"}\n{"body": "y", "text": 1}')
    assert texts(tmp_path / "a.jsonl", "body") == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{oops}", "a.jsonl:3: not JSON"),
        (b"[1]", "a.jsonl:3: a JSON object was expected, not a list"),
        (b'{"body": "x", "id": 3}', "a.jsonl:3: no field 'text'\n    Fields here: body, id."),
        (b'{"text": null}', "a.jsonl:3: field 'text' must be a string, not null"),
        (b'{"text": 7}', "a.jsonl:3: field 'text' must be a string, not a number"),
        (b'{"text": "\\ud800"}', "a.jsonl:3: field 'text' holds half of a surrogate pair"),
        (b'{"text": "\xff"}', "a.jsonl is not UTF-8: byte 28 is 0xff"),
    ],
)
def test_bad_lines(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + b"\n" + line + b"\n")
    assert said in refused(tmp_path / "a.jsonl")


def test_the_line_number_counts_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 16)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 9 + "nonsense\n")
    assert "a.jsonl:10: not JSON" in refused(tmp_path / "a.jsonl")


def test_not_utf8_names_the_file_and_the_byte(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    assert f"{tmp_path}/latin.txt is not UTF-8: byte 3 is 0xe9" in refused(tmp_path)


def test_only_stdlib_may_leave_out_a_file(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# café".encode("latin-1"))
    source = Source("stdlib", (tmp_path / "latin.py",), "", skip_undecodable=True)
    assert [text for piece in source.pieces() for text in read(piece)] == []


def parquet(path: Path, table: dict[str, list[object]], rows: int = 2) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=rows)
    return path


def test_parquet_by_row_groups(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["a", "b", "", "ü", "e"], "id": [1, 2, 3, 4, 5]})
    assert len(find_source(str(path), "text").pieces()) == 3
    assert texts(path) == ["a", "b", "ü", "e"]


def test_parquet_dictionary_column(tmp_path: Path) -> None:
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_bad_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"body": ["a", "b", None], "id": [1, 2, 3]})
    assert "has no column 'text'\n    Columns: body, id." in refused(path)
    assert "column 'id' must hold strings, not int64" in refused(path, "id")
    assert "row 2 (from 0): column 'body' is null" in refused(path, "body")
    (tmp_path / "b.parquet").write_text("not parquet")
    assert "b.parquet is not a Parquet file" in refused(tmp_path / "b.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    assert "a.parquet, row group 0: cannot be read" in refused(path, "body")


def test_nothing_there(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "missing.txt")
    assert "Allowed: stdlib, random, a file, a folder or a glob." in refused("stdlb")
    assert "does not exist" in refused("")
    assert "no file matches" in refused(tmp_path / "*.txt")
    assert "holds no files" in refused(tmp_path)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"dangling.txt cannot be read: No such file"):
        find_source(str(tmp_path), "text").content_key()


def test_content_key_is_of_content(tmp_path: Path) -> None:
    def key(name: str, files: dict[str, str], text_field: str = "text") -> str:
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
        return find_source(str(tmp_path / name), text_field).content_key()

    base = key("here", {"a.txt": "one", "b.txt": "two"})
    assert key("there", {"a.txt": "one", "b.txt": "two"}) == base
    different = [
        key("changed", {"a.txt": "one", "b.txt": "twO"}),
        key("moved", {"a.txt": "onet", "b.txt": "wo"}),
        key("order", {"b.txt": "one", "a.txt": "two"}),
        key("kind", {"a.txt": "one", "b.jsonl": "two"}),
        key("field", {"a.txt": "one", "b.txt": "two"}, "body"),
    ]
    assert len({base, *different}) == 6


def test_a_large_file_is_known_by_its_size_time_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.data.sources.HASHED_WHOLE", 1000)
    monkeypatch.setattr("fivefold.data.sources.HASHED_ENDS", 100)
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * 5000)
    source = find_source(str(path), "text")
    keys = {source.content_key()}
    for at in (0, 4999):
        content = bytearray(b"x" * 5000)
        content[at] = 0
        path.write_bytes(content)
        keys.add(source.content_key())
    path.write_bytes(b"x" * 5001)
    keys.add(source.content_key())
    assert len(keys) == 4
    os.utime(path, ns=(0, 1))  # other bytes may have come into its middle
    assert source.content_key() not in keys
    keys.add(source.content_key())
    assert source.content_key() in keys
