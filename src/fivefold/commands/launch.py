"""`fivefold launch`"""

from typing import Annotated, Literal

import typer

from fivefold.commands.common import Preset, RunFolder, Words, read_job, reporting

OPTIONS = (
    *(
        "--hosts",
        "--slurm",
        "--kubernetes",
        "--skypilot",
        "--nodes",
        "--nproc-per-node",
        "--gpus",
        "--folder",
    ),
    *("--python", "--env", "--port", "--grace", "--ssh", "--master", "--dry-run", "--restarts", "--setup"),
    *("--sbatch", "--kind", "--image", "--storage", "--force"),
)
"""For hints where one is misspelt."""


def launch(
    words: Words = None,
    preset: Preset = None,
    hosts: Annotated[
        str | None, typer.Option(help="Start it on these hosts by ssh: a,b,user@c. All meet at the first.")
    ] = None,
    slurm: Annotated[str | None, typer.Option(metavar="FILE", help="Write a script for sbatch.")] = None,
    kubernetes: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a TrainJob of Kubeflow, or a JobSet (--kind).")
    ] = None,
    skypilot: Annotated[str | None, typer.Option(metavar="FILE", help="Write a task of SkyPilot.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="How many machines. Default: what the layout says.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks on each machine. Default: what the layout says.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of a machine: 8, or H100:8; 0 for CPUs. Default: one a rank."),
    ] = None,
    run: RunFolder = None,
    folder: Annotated[
        str | None, typer.Option(help="Where it runs on the machines. Default for ssh: this folder.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Python on the machines. Default: this one for ssh, else `python`."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable for all ranks; repeatable.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Where the machines meet. Default: 29400.")] = None,
    grace: Annotated[
        int | None, typer.Option(help="Seconds that ranks get to save when they must stop. Default: 180.")
    ] = None,
    ssh: Annotated[str | None, typer.Option(help="ssh: the command, with its options.")] = None,
    master: Annotated[
        str | None, typer.Option(help="ssh: the first host's address, as the others reach it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="ssh: print the commands, run none.")] = False,
    restarts: Annotated[
        int | None, typer.Option(help="How often a platform starts a failed job again. Default: 20.")
    ] = None,
    setup: Annotated[
        str | None, typer.Option(help="Slurm, SkyPilot: a line of shell that comes first.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Slurm: an option of sbatch, partition=gpu; repeatable."),
    ] = None,
    kind: Annotated[
        Literal["trainjob", "jobset"] | None, typer.Option(help="Kubernetes. Default: trainjob.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Kubernetes: a container's image, with fivefold.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:/PATH]",
            help="What all machines share: a claim (Kubernetes), a volume or bucket (SkyPilot).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Train on several machines: start a job over ssh, or write the file with which a platform starts it.

    A job that does not go with machines x ranks is refused before anything starts. Over ssh the lines of
    every host come with its name; hosts that cannot start are named before anything is trained; one that
    fails ends all, is named, and the exit code is 1. Ctrl-C lets the ranks of all hosts save and end.

    \b
    Examples:
      fivefold launch job.toml --hosts gpu1,gpu2 --nproc-per-node 8 --run.folder /shared/runs/big
      fivefold launch job.toml --hosts gpu1,gpu2 --nproc-per-node 8 --dry-run
      fivefold launch job.toml --slurm job.sbatch --nodes 4 --nproc-per-node 8 --sbatch time=24:00:00
      fivefold launch job.toml --kubernetes k.yaml --nodes 4 --nproc-per-node 8 --image IMAGE --storage CLAIM
      fivefold launch job.toml --skypilot s.yaml --nodes 2 --nproc-per-node 8 --gpus H100:8 --storage VOLUME
    """
    with reporting(False):
        job = read_job(words, preset, *OPTIONS)
        from fivefold.launching.request import Request

        request = Request(
            job=job,
            words=words or [],
            preset=preset,
            run=run,
            hosts=hosts,
            slurm=slurm,
            kubernetes=kubernetes,
            skypilot=skypilot,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            gpus=gpus,
            folder=folder,
            python=python,
            env=env or [],
            port=port,
            grace=grace,
            ssh=ssh,
            master=master,
            dry_run=dry_run,
            restarts=restarts,
            setup=setup,
            sbatch=sbatch or [],
            kind=kind,
            image=image,
            storage=storage,
            force=force,
        )
        following = request.carry_out()
        if following is not None:
            print(f"written. To start it: {following}")
