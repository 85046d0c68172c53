"""`fivefold models`"""

from fivefold.commands.common import AsJson, print_json, print_table


def models(as_json: AsJson = False) -> None:
    """List the built-in models, with exact parameter counts."""
    from fivefold.models.inventory import parameter_count
    from fivefold.models.presets import PRESETS

    counts = {name: parameter_count(spec) for name, spec in PRESETS.items()}
    if as_json:
        print_json({name: {**PRESETS[name].model_dump(), "parameters": counts[name]} for name in PRESETS})
        return
    rows = [
        (
            name,
            f"{count:,}",
            f"{spec.layers}",
            f"{spec.dim:,}",
            f"{spec.heads}/{spec.kv_heads}",
            f"{spec.vocab_size:,}",
        )
        for (name, spec), count in zip(PRESETS.items(), counts.values(), strict=True)
    ]
    print_table(("model", "parameters", "layers", "width", "heads/kv", "vocabulary"), rows)
