"""Draws context.svg: which tokens each of four ranks holds, and which blocks of attention are whose work.

    python docs/pictures/context.py

Who sees what comes from axes/zigzag.py, the rule that the ring itself follows.
"""

from __future__ import annotations

import torch
from drawing import AMBER, BLUE, GREEN, GREY, LINE, PALE, PURPLE, arrow, box, save, text

from fivefold.axes.runtime.zigzag import halves, local_part

RANKS = 4
CHUNKS = 2 * RANKS
COLOURS = (BLUE, AMBER, GREEN, PURPLE)
CELL = 42
WIDTH, HEIGHT = 980, 520
GRID_X, GRID_Y = 70, 112


def holders() -> list[int]:
    """The rank that holds each chunk."""
    found = [0] * CHUNKS
    for rank in range(RANKS):
        for chunk in local_part(torch.arange(CHUNKS), rank, RANKS).tolist():
            found[chunk] = rank
    return found


def visible(query: int, key: int) -> str | None:
    """Of two chunks: "all" keys are seen, "causal"ly, or None of them."""
    held = holders()
    rank, source = held[query], held[key]
    own = local_part(torch.arange(CHUNKS), rank, RANKS).tolist()
    theirs = local_part(torch.arange(CHUNKS), source, RANKS).tolist()
    if rank == source:
        return "causal" if query == key else "all" if query > key else None
    queries, keys = halves(rank, source, 2)
    return "all" if query in own[queries] and key in theirs[keys] else None


def grid() -> list[str]:
    held = holders()
    drawn = [text(GRID_X + 4 * CELL, 82, "keys, in the order of the sequence", 12, "middle", colour=GREY)]
    for chunk in range(CHUNKS):
        colour = COLOURS[held[chunk]]
        middle = chunk * CELL + CELL / 2
        drawn.append(text(GRID_X + middle, GRID_Y - 10, str(held[chunk]), 13, "middle", True, colour))
        drawn.append(text(GRID_X - 14, GRID_Y + middle + 5, str(held[chunk]), 13, "middle", True, colour))
    for query in range(CHUNKS):
        for key in range(CHUNKS):
            x, y = GRID_X + key * CELL, GRID_Y + query * CELL
            drawn.append(box(x, y, CELL, CELL, "#ffffff", LINE))
            colour = COLOURS[held[query]]
            seen = visible(query, key)
            if seen == "all":
                drawn.append(box(x + 2, y + 2, CELL - 4, CELL - 4, colour))
            elif seen == "causal":
                corners = f"{x + 2:g},{y + 2:g} {x + 2:g},{y + CELL - 2:g} {x + CELL - 2:g},{y + CELL - 2:g}"
                drawn.append(f'<polygon points="{corners}" fill="{colour}"/>')
    middle = GRID_Y + 4 * CELL
    drawn.append(
        f'<text transform="translate(28 {middle:g}) rotate(-90)" font-size="12" text-anchor="middle" '
        f'fill="{GREY}">queries</text>'
    )
    below = GRID_Y + CHUNKS * CELL + 26
    drawn.append(text(GRID_X, below, "Numbers: who holds the chunk. Colours: who computes the"))
    drawn.append(text(GRID_X, below + 18, "block. Every rank has 7 full blocks and 2 halves."))
    return drawn


def ring(x: float, y: float) -> list[str]:
    """Rank 1's four turns."""
    rank = 1
    drawn = [
        text(x, y - 30, "Rank 1's turns: its queries stay, keys and values come by", 14, bold=True),
        text(x + 24, y - 8, "its queries", 12, colour=GREY),
        text(x + 158, y - 8, "keys, values", 12, colour=GREY),
        text(x + 272, y - 8, "meanwhile", 12, colour=GREY),
    ]
    own = local_part(torch.arange(CHUNKS), rank, RANKS).tolist()
    for turn in range(RANKS):
        source = (rank - turn) % RANKS
        theirs = local_part(torch.arange(CHUNKS), source, RANKS).tolist()
        top = y + turn * 84
        queries, keys = (slice(None), slice(None)) if source == rank else halves(rank, source, 2)
        drawn.append(text(x, top + 33, f"{turn + 1}.", 14, bold=True))
        for number in range(2):
            used = own[number] in own[queries]
            drawn += chunk_box(x + 24 + 48 * number, top + 8, own[number], COLOURS[rank], used)
            used = theirs[number] in theirs[keys]
            drawn += chunk_box(x + 164 + 48 * number, top + 8, theirs[number], COLOURS[source], used)
        drawn.append(arrow((x + 124, top + 28), (x + 160, top + 28)))
        if turn < RANKS - 1:
            coming = (rank - turn - 1) % RANKS
            drawn.append(text(x + 272, top + 25, f"these go on to rank {rank + 1};", 12))
            drawn.append(text(x + 272, top + 41, f"those of rank {coming} arrive", 12))
        else:
            drawn.append(text(x + 272, top + 33, "nothing: all have been here", 12))
    return drawn


def chunk_box(x: float, y: float, chunk: int, colour: str, used: bool) -> list[str]:
    fill, ink = (colour, "#ffffff") if used else (PALE[colour], GREY)
    return [box(x, y, 44, 40, fill, colour, 4), text(x + 22, y + 25, str(chunk), 13, "middle", colour=ink)]


if __name__ == "__main__":
    words = "A sequence in 8 chunks on 4 ranks: rank r holds chunks r and 7 - r, an early one and a late one"
    drawn = [text(28, 38, words, 15, bold=True), *grid(), *ring(490, GRID_Y + 18)]
    drawn.append(
        text(490, HEIGHT - 42, "Pale: not needed in that turn. In the first turn a rank has three blocks,")
    )
    drawn.append(
        text(490, HEIGHT - 24, "two of them halves; later it has two. So no rank waits for another.")
    )
    save(__file__, "Zigzag chunks and the ring of the context axis", WIDTH, HEIGHT, drawn)
