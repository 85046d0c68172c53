"""The ranks of one host: torchrun in this process, until they have ended or nobody listens any more.

    python -m fivefold.launching.host TORCHRUN_OPTIONS -m fivefold train JOB

When stdin ends, by whoever started this or because the connection is gone, the ranks are asked to stop: they
save and end, as after SIGTERM.
"""

import os
import signal
import sys
import threading

from fivefold.threads import cores

MODULE = "fivefold.launching.host"
ENDED_BY = "was ended by"
"""In the line about a rank that a signal ended: the cause, where others only lost a peer."""


def main(words: list[str]) -> int:
    """Run the ranks; the exit code: 0, 1 when ranks failed, 128 + N when stopped by signal N."""
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:  # a peer that is gone shall not be told by torch's stacks; read when torch is imported
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks say what they have to
    threading.Thread(target=_stop_with_stdin, daemon=True).start()
    given = run.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(given.nproc_per_node))))
    try:
        run.run(given)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # that one is torchrun's own
                _say(f"rank {rank} {ENDED_BY} {signal.Signals(-failure.exitcode).name}")
        return 1
    except RendezvousError as error:
        _say(f"the hosts cannot meet: {error}")
        return 1
    return 0


def _stop_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
