"""A job from a preset, a TOML file and overrides, in rising order of precedence."""

import tomllib
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fivefold.config.complain import problems_in, shown
from fivefold.config.run_folder import file_to_go_on
from fivefold.config.schema import Job, Model, merged
from fivefold.models.presets import PRESETS
from fivefold.models.spec import ModelSpec
from fivefold.problems import BadInput, Problem, closest, refuse

Tree = dict[str, Any]

# What a preset's model wants that differs from the defaults of the sections. The file and overrides go first.
PRESET_SETTINGS: dict[str, Tree] = {"tiny": {"optimizer": {"lr": 3e-3}}}


def load(path: str | None = None, preset: str | None = None, overrides: list[str] | None = None) -> Job:
    """The job that a file, a preset and overrides describe. Raises `BadInput` with all that is wrong.

    path       a TOML file, the folder of a run to go on with, or None
    preset     short for `--model.preset`
    overrides  words of a command line: `--training.steps 10` (two words) or `--training.steps=10` (one)
    """
    return job_with(settings_in(overrides or []), preset=preset, path=path)


def settings_in(words: list[str], options: Iterable[str] = ()) -> Tree:
    """The settings among words that are nothing else, by dotted key. Raises `BadInput`."""
    plain, settings = sort_words(words, options)
    refuse(Problem(word, "is not a setting", "Write --section.key VALUE.") for word in plain)
    return {key: setting_value(key, text) for key, text in settings}


def job_with(*settings: Mapping[str, Any], preset: str | None = None, path: str | None = None) -> Job:
    """The job that values describe, over a preset and a file. Raises `BadInput` with all that is wrong.

    settings  by dotted key, `{"training.steps": 10}`, or by section, `{"training": {"steps": 10}}`; of
              several mappings each goes over those before it
    """
    given = _read(path) if path is not None else {}
    if preset is not None:
        _put(given, ["model", "preset"], preset, "--preset")
    for key, value in (item for each in settings for item in each.items()):
        if isinstance(value, Mapping) and "." not in key:
            given.setdefault(key, {})
            for name, inner in value.items():
                _put(given, [key, name], inner, f"--{key}.{name}")
        else:
            _put(given, key.split("."), value, f"--{key}")
    model = given.get("model", {})
    name = model.get("preset", None if model else "tiny") if isinstance(model, dict) else None
    wanted = PRESET_SETTINGS.get(name, {}) if isinstance(name, str) else {}
    return _validated(merged(wanted, given))


def by_key(*settings: Mapping[str, Any]) -> Tree:
    """Settings as `job_with` takes them, all by dotted key."""
    found: Tree = {}
    for key, value in (item for each in settings for item in each.items()):
        inner = value if isinstance(value, Mapping) and "." not in key else None
        found |= {key: value} if inner is None else {f"{key}.{name}": each for name, each in inner.items()}
    return found


def sort_words(words: list[str], options: Iterable[str] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """The words of a command line that are not settings, and (`section.key`, value) for each setting.

    options  what else the command line takes (`--nproc`), for hints. Raises `BadInput`.
    """
    plain, settings, problems, rest = [], [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            plain.append(word)
            continue
        option, equals, text = word.partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = "=", rest.pop(0)
        if not option.startswith("--") or "." not in option:
            problems.append(Problem(option, "there is no such option", _as_setting(option, options)))
        elif not equals:
            problems.append(Problem(option, "has no value", f"Write {option} VALUE."))
        else:
            settings.append((option.removeprefix("--"), text))
    refuse(problems)
    return plain, settings


def _as_setting(option: str, options: Iterable[str]) -> str:
    """What an unknown option was probably meant to be."""
    name = option.lstrip("-")
    for section, field in Job.model_fields.items():
        if isinstance(field.annotation, type) and name in _fields(field.annotation):
            return f"Did you mean '--{section}.{name}'?"
    near = closest(option, options)
    if near:
        return f"Did you mean '{near}'?"
    return "A setting is --section.key VALUE, such as --training.steps 100; `fivefold keys` lists them."


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    """A section's fields by the name the user writes."""
    models = (section, ModelSpec) if section is Model else (section,)
    return {field.alias or name: field for model in models for name, field in model.model_fields.items()}


def setting_value(key: str, text: str) -> Any:
    """The text of an override as TOML, or as it stands: whichever the key takes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text
    section, _, name = key.partition(".")
    holder = Job.model_fields.get(section)
    field = _fields(holder.annotation).get(name) if holder and isinstance(holder.annotation, type) else None
    if field is None:
        return value
    for candidate in (value, text):
        try:
            TypeAdapter(field.annotation).validate_python(candidate)
            return candidate
        except ValidationError:
            continue
    return value


def _read(path: str) -> Tree:
    """The tables of a TOML file, or of a run's folder. Raises `BadInput` with the line of a syntax error."""
    if Path(path).is_dir():
        return merged(_read(str(file_to_go_on(Path(path)))), {"run": {"folder": path}})
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        known = f"Did you mean --preset {path}?" if path in PRESETS else "Give the path of a job file (TOML)."
        raise BadInput([Problem(path, "there is no such file", known)]) from None
    except OSError as error:
        raise BadInput([Problem(path, f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise BadInput([Problem(path, f"is not UTF-8 (byte {error.start})", "Save it as UTF-8.")]) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line = _place(str(error), text)
        raise BadInput(
            [Problem(f"{path}:{line}", f"is not TOML: {reason}", _source_line(text, line))]
        ) from None


def _place(message: str, text: str) -> tuple[str, int]:
    """tomllib's message without its place, and the line it names."""
    reason, _, place = message.partition(" (at ")
    words = place.replace(",", "").split()
    if "line" in words:
        return reason, int(words[words.index("line") + 1])
    return reason, max(1, len(text.splitlines()))  # "(at end of document)"


def _source_line(text: str, line: int) -> str:
    lines = text.splitlines()
    return f"The line reads: {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""


def _put(tree: Tree, path: list[str], value: Any, option: str) -> None:
    """Set a value in nested tables, making those that are missing."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise BadInput([Problem(option, f"{part} is {shown(tree)} already, not a section")])
    tree[path[-1]] = fspath(value) if isinstance(value, PathLike) else value


def _validated(tree: Tree) -> Job:
    """The job, or `BadInput` with the problems of every section, the model's included."""
    problems: list[Problem] = []
    model = tree.get("model", {})
    if isinstance(model, dict):
        try:
            _ = Model.model_validate(model).spec  # raises
        except BadInput as error:
            problems += error.problems
        except ValidationError as error:
            problems += problems_in(error, Model, "model")
    try:
        job = Job.model_validate({**tree, "model": {}} if problems else tree)
    except BadInput as error:
        problems += error.problems
    refuse(problems)
    return job
