"""`fivefold probe`"""

from typing import Annotated

import typer

from fivefold.commands.common import AsJson, print_json, print_table, reporting


def probe(
    nproc: Annotated[
        int | None, typer.Option(help="How many ranks measure together. Default: one per GPU, else 1.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Write a cluster file for plan, simulate and train (.toml).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, in at most a minute.

    Rates of matrix products by dtype and shape, attention, memory, the time an operation takes to start, and,
    with two ranks or more, how long messages between them take. All ranks measure at the same time.

    \b
    Examples:
      fivefold probe
      fivefold probe --nproc 4 --out here.toml
      fivefold plan --model tiny --cluster here.toml --gpus 4
    """
    with reporting(as_json):
        from fivefold.bench.described import as_json as told
        from fivefold.bench.described import tables
        from fivefold.bench.probe import check
        from fivefold.bench.probe import probe as measure
        from fivefold.hardware.cluster import write_cluster
        from fivefold.problems import refuse

        refuse(check(nproc, out))
        probed = measure(nproc)
        if out is not None:
            write_cluster(probed.cluster, out)
        if as_json:
            print_json({"seconds": probed.seconds, "out": out} | told(probed.cluster))
            return
        for title, header, rows in tables(probed.cluster):
            print(f"{title}\n")
            print_table(header, rows)
            print()
        print(f"measured in {probed.seconds:.0f} s" + (f"; written to {out}" if out else ""))
