"""A job on several machines: started over ssh, or written as a file for the platform that starts it.

    request.py     what was asked for: one platform, and options that are of use to it
    machines.py    how many machines with how many ranks each, and what every one of them runs
    ssh.py         hosts that are reached by ssh
    together.py    several commands at once: one that fails ends all
    host.py        what runs on each of these hosts: torchrun, until it is told to stop
    slurm.py       a script for sbatch
    kubernetes.py  a TrainJob of Kubeflow, or a JobSet
    skypilot.py    a task of SkyPilot
    gpus.py, storage.py  what is asked of machines
    yaml.py        values as YAML
    files.py       where such a file may be written

No torch here, but on the hosts.
"""
