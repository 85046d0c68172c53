"""What each key of a job allows, read off the pydantic models, for error messages and for `fivefold keys`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

Node = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One setting, as the user writes it: `training.steps`.

    default  None when there is none, or when it depends on other settings; the description says then
    """

    name: str
    allowed: str
    default: Any
    description: str


class Keys:
    """The tree of keys below a pydantic model."""

    def __init__(self, model: type[BaseModel]):
        self._schema = model.model_json_schema(by_alias=True)
        self.root: Node = self._schema

    def below(self, node: Node) -> Mapping[str, Node]:
        """The keys of a section by name; none when `node` is a plain value."""
        properties: Mapping[str, Node] = self._plain(node).get("properties", {})
        return properties

    def allowed(self, node: Node) -> str:
        """What a value may be, in words: `an integer, at least 1`."""
        node = self._plain(node)
        if "anyOf" in node:
            return ", or ".join(
                self.allowed(choice) for choice in node["anyOf"] if choice.get("type") != "null"
            )
        if "enum" in node or "const" in node:
            return "one of " + ", ".join(map(str, node.get("enum", [node.get("const")])))
        if node.get("type") == "array":
            if "prefixItems" in node:
                return f"a list of {len(node['prefixItems'])}, each {self.allowed(node['prefixItems'][0])}"
            return f"a list, each entry {self.allowed(node.get('items', {}))}"
        if node.get("type") == "object":
            return "a table of " + ", ".join(self.below(node))
        words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text"}
        bounds = {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        limits = [f"{word} {node[bound]}" for bound, word in bounds.items() if bound in node]
        return ", ".join(
            [words.get(node.get("type", ""), "a value"), *([" and ".join(limits)] if limits else [])]
        )

    def list(self, prefix: str, node: Node) -> Iterator[Key]:
        """Every key below `node`, sections first to last, nested tables as one key."""
        for name, child in self.below(node).items():
            path = f"{prefix}.{name}" if prefix else name
            if not prefix and self.below(child):
                yield from self.list(path, child)
            else:
                description = child.get("description", "")
                default = None if "(default: " in description else child.get("default")
                yield Key(path, self.allowed(child), default, description)

    def _plain(self, node: Node) -> Node:
        """The node itself behind a reference, or behind `X or nothing`."""
        if "$ref" in node:
            found: Node = self._schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
            return self._plain(found)
        choices = [choice for choice in node.get("anyOf", []) if choice.get("type") != "null"]
        return self._plain(choices[0]) if len(choices) == 1 else node
