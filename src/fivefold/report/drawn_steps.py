"""A collective step by step, as text and as a picture: who has what, and which chunk goes where."""

from typing import Any

from fivefold.comm.algorithms import ALGORITHMS, Algorithm, Held, Move, held, sent_by
from fivefold.problems import Problem, did_you_mean, refuse
from fivefold.report.figures import pyplot, save

MOST_RANKS = 16
COLUMNS = 4
"""Of small pictures beside each other."""


def drawable(name: str, ranks: int) -> Algorithm:
    """The algorithm of that name. Raises `BadInput` where it is unknown, or has too many ranks to look at."""
    problems = []
    if name not in ALGORITHMS:
        problems.append(Problem("--draw", f"'{name}' is unknown", did_you_mean(name, ALGORITHMS)))
    if not 2 <= ranks <= MOST_RANKS:
        problems.append(Problem("--ranks", f"{ranks} ranks cannot be drawn", f"Give 2 to {MOST_RANKS}."))
    refuse(problems)
    return ALGORITHMS[name]


def summary(algorithm: Algorithm, ranks: int) -> str:
    """One line: steps, and what the busiest rank sends."""
    steps, chunks = len(algorithm.steps(ranks)), algorithm.chunks(ranks)
    messages, most = max(sent_by(algorithm, ranks), key=lambda sent: sent[1])
    shared = (
        ranks if algorithm.operation == "all_to_all" else 1
    )  # there each rank's tensor has its own chunks
    return (
        f"{algorithm.operation} by {algorithm.name}: {ranks} ranks, {steps} steps; the busiest rank sends "
        f"{most * shared / chunks:.3g} tensors in {messages} messages"
    )


def lines(algorithm: Algorithm, ranks: int) -> list[str]:
    """Before each step who has what, and what each rank then sends; last, what all have in the end.

    A number says how many ranks' parts are in a chunk, a dot that a rank has nothing of it.
    """
    states, chunks = held(algorithm, ranks), algorithm.chunks(ranks)
    width = max(len(str(chunks - 1)), len(str(ranks))) + 1
    heading = " " * 9 + "".join(f"{chunk:{width}}" for chunk in range(chunks)) + "  <- chunk"
    found = [summary(algorithm, ranks)]
    for number, state in enumerate(states):
        steps = algorithm.steps(ranks)
        last = number == len(steps)
        found += ["", "at the end" if last else f"step {number + 1}", heading]
        for rank in range(ranks):
            cells = "".join(f"{_parts(state, rank, chunk):>{width}}" for chunk in range(chunks))
            sends = [] if last else [_words(move) for move in steps[number] if move.source == rank]
            found.append(f"  rank {rank:<2}{cells}  {'; '.join(sends)}".rstrip())
    return found


def _parts(state: Held, rank: int, chunk: int) -> str:
    return str(sum(state[rank][chunk])) if chunk in state[rank] else "."


def _words(move: Move) -> str:
    first, last = move.chunks[0], move.chunks[-1]
    which = f"chunk {first}" if first == last else f"chunks {first} to {last}"
    return f"{which} to rank {move.to}" + (", which adds" if move.adds else "")


def as_json(algorithm: Algorithm, ranks: int) -> dict[str, Any]:
    """The moves of each step, and what each rank sends."""
    return {
        "operation": algorithm.operation,
        "algorithm": algorithm.name,
        "ranks": ranks,
        "chunks": algorithm.chunks(ranks),
        "steps": [
            [{"from": m.source, "to": m.to, "chunks": list(m.chunks), "adds": m.adds} for m in step]
            for step in algorithm.steps(ranks)
        ],
        "sent": [
            {"rank": rank, "messages": messages, "chunks": chunks}
            for rank, (messages, chunks) in enumerate(sent_by(algorithm, ranks))
        ],
    }


def picture(algorithm: Algorithm, ranks: int, path: str) -> None:
    """A small picture for each step, and one of the end. Raises `BadInput`."""
    plt = pyplot()
    states, steps, chunks = held(algorithm, ranks), algorithm.steps(ranks), algorithm.chunks(ranks)
    columns = min(COLUMNS, len(states))
    rows = -(-len(states) // columns)
    size = columns * (2.0 + 0.42 * chunks), rows * (1.0 + 0.42 * ranks) + 0.5
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for place in axes.flat[len(states) :]:
        place.axis("off")
    for number, (place, state) in enumerate(zip(axes.flat, states, strict=False)):
        _draw_held(place, state, chunks)
        for move in steps[number] if number < len(steps) else []:
            _draw_move(place, move)
        place.set_title("at the end" if number == len(steps) else f"step {number + 1}", fontsize=10)
    legend = "a number: how many ranks' parts are in a chunk; orange: added to it, green: put in its place"
    figure.suptitle(f"{summary(algorithm, ranks)}\n{legend}", fontsize=10)
    save(figure, path)


def _draw_held(place: Any, state: Held, chunks: int) -> None:
    """Ranks by chunks: the more is in one, the darker it is."""
    ranks = len(state)
    shares = [[sum(mine.get(chunk, ())) / ranks for chunk in range(chunks)] for mine in state]
    place.imshow(shares, cmap="Blues", vmin=0, vmax=2.2, aspect="equal")
    for rank, mine in enumerate(state):
        for chunk in mine:
            place.text(chunk, rank, _parts(state, rank, chunk), ha="center", va="center", fontsize=8)
    place.set_xticks(range(chunks), [str(chunk) for chunk in range(chunks)], fontsize=7)
    place.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=7)
    place.set_xticks([chunk - 0.5 for chunk in range(1, chunks)], minor=True)
    place.set_yticks([rank - 0.5 for rank in range(1, ranks)], minor=True)
    place.grid(which="minor", color="white", linewidth=1.5)
    place.tick_params(which="both", length=0)
    place.spines[:].set_visible(False)


def _draw_move(place: Any, move: Move) -> None:
    """From the sender's row to the receiver's, in the middle of the chunks."""
    middle = sum(move.chunks) / len(move.chunks)
    colour = "#d9480f" if move.adds else "#2b8a3e"
    bend = 0.25 if abs(move.to - move.source) == 1 else 0.12
    place.annotate(
        "",
        xy=(middle + 0.22, move.to),
        xytext=(middle + 0.22, move.source),
        arrowprops={"arrowstyle": "->", "color": colour, "connectionstyle": f"arc3,rad={bend}", "lw": 1.3},
    )
