"""Which parameter a tensor of a checkpoint belongs to, by its name there. No torch here."""


def parameter_of(name: str) -> str:
    """`model.head.norm.weight`, `optimizer.head.norm.weight.exp_avg`, ... -> `head.norm.weight`."""
    kind, _, rest = name.partition(".")
    if kind == "replica":
        return parameter_of(rest.partition(".")[2])
    if kind == "residual":
        return rest.partition(".")[2]
    if kind == "outer" and ".arriving." in rest:
        return rest.rpartition(".arriving.")[0]
    return rest.rpartition(".")[0] if kind in ("optimizer", "outer", "started", "lost") else rest


def replica_of(name: str) -> int | None:
    """Which replica's it is; None of what all have alike."""
    kind, _, rest = name.partition(".")
    if kind == "replica":
        return int(rest.partition(".")[0])
    return None if kind == "outer" else 0
