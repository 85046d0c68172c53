"""`fivefold checkpoint import-hf` and `export-hf`: Hugging Face folders in and out. Neither needs a GPU."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fivefold.commands.common import AsJson, print_json, reporting
from fivefold.problems import BadInput, Problem

GIB = 2**30


def import_hf(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="config.json and safetensors files, as downloaded.", show_default=False
        ),
    ],
    run: Annotated[str, typer.Option("--run", help="The run's folder, which must hold no checkpoint yet.")],
    as_json: AsJson = False,
) -> None:
    """Make a run of a Hugging Face folder: a checkpoint of step 0 with its weights, to train on.

    Families: llama, mistral, qwen2, qwen3, gemma2, mixtral, gpt2. The tokenizer comes along. Pickles
    (pytorch_model.bin) are not read, and no code of the folder is executed.

    \b
    Examples:
      fivefold checkpoint import-hf Llama-3.2-1B --run runs/llama
      fivefold train runs/llama --data.source "books/*.txt" --training.steps 500
    """
    with reporting(as_json):
        from fivefold.interchange.bring import bring_in

        found = bring_in(Path(folder), Path(run))
        for note in found.notes:
            print(note, file=sys.stderr)
        if as_json:
            print_json({"run": run, **asdict(found)})
            return
        print(
            f"{found.family}: {found.parameters:,} parameters in {found.tensors:,} tensors "
            f"({', '.join(found.dtypes)}), {found.bytes / GIB:.3f} GiB"
        )
        print(f"tokenizer: {found.tokenizer or 'none'}")
        print(f"train it with: fivefold train {run}")


def export_hf(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The folder to write, new or empty.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step. Default: the newest.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights (optimizer.ema).")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="bf16, fp16, fp32 or fp64. Default: what the weights came in, or are trained in."),
    ] = None,
    shard_gb: Annotated[float, typer.Option(help="Most gigabytes (10^9 bytes) in one file.")] = 5.0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model in a folder that is not empty.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights as a Hugging Face folder, for `AutoModelForCausalLM.from_pretrained(OUT)`.

    config.json, safetensors files (with an index where there are several), generation_config.json and the
    tokenizer. One tensor is in memory at a time. The checkpoint is verified first.

    \b
    Examples:
      fivefold checkpoint export-hf runs/llama out
      fivefold checkpoint export-hf runs/llama out --step 500 --ema --dtype bf16
    """
    with reporting(as_json):
        from fivefold.interchange.export import DTYPES, export

        if dtype is not None and dtype not in DTYPES:
            allowed = f"Allowed: one of {', '.join(DTYPES)}."
            raise BadInput([Problem("--dtype", f"'{dtype}' is not known", allowed)])
        if not 0 < shard_gb < float("inf"):
            raise BadInput(
                [Problem("--shard-gb", f"{shard_gb} is out of range", "Allowed: a number above 0.")]
            )
        found = export(Path(run), Path(out), step, ema, dtype, int(shard_gb * 10**9), force)
        for note in found.notes:
            print(note, file=sys.stderr)
        if as_json:
            print_json({"run": run, "out": out, **asdict(found)})
            return
        what = "averaged weights" if ema else "weights"
        print(
            f"{found.family}: {what} of step {found.step}, {found.tensors:,} tensors "
            f"({', '.join(found.dtypes)}), {found.bytes / GIB:.3f} GiB"
        )
        print(f"{out}: {', '.join(found.files)}")
