"""The small files of a Hugging Face folder, kept with a run so that they can be written out again.

RUN/huggingface/config.json, tokenizer.json, ...   as they were
RUN/huggingface/dtypes.json                        the dtype of each tensor of the weights
"""

import json
import shutil
from pathlib import Path

from fivefold.models.huggingface import Config, load_config
from fivefold.problems import BadInput, Problem
from fivefold.storage.folder import durable

FOLDER, DTYPES_FILE, CONFIG, GENERATION = (
    "huggingface",
    "dtypes.json",
    "config.json",
    "generation_config.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def keep(source: Path, run: Path, dtypes: dict[str, str]) -> Path:
    """Copy what belongs to the weights of a folder into a run's. Returns where they lie."""
    kept = run / FOLDER
    if kept.resolve() == source.resolve():
        return kept
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in (CONFIG, GENERATION, *TOKENIZER_FILES):
        if (source / name).is_file():
            durable(kept / name, (source / name).read_bytes())
    durable(kept / DTYPES_FILE, json.dumps(dtypes, indent=1).encode())
    return kept


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILES[0]).is_file()


def kept_config(run: Path) -> Config | None:
    """The config.json that a run's weights came with; None where they came with none."""
    return load_config(run / FOLDER, "RUN") if (run / FOLDER / CONFIG).is_file() else None


def kept_dtypes(run: Path) -> dict[str, str]:
    """The dtype of each tensor that a run's weights came in; empty where they came from nowhere."""
    path = run / FOLDER / DTYPES_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        return {str(name): str(dtype) for name, dtype in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput([Problem(str(path), f"cannot be read: {error}", "Remove it.")]) from None
