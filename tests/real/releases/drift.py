"""Say what moved, between two releases of DeepSpeed, of what gradtrace's adapters rely on.

    python -m tests.real.releases.drift DIR_A DIR_B

A directory is one that holds ``deepspeed/`` (``pip install --target``). Sources are parsed, nothing is
imported. What is looked at is read from the adapters' own declarations.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gradtrace.capture.adapters import select

ENGINE = "DeepSpeedEngine"


@dataclass(frozen=True)
class Method:
    """Hold what of a method may move: its signature, and a hash of its body without docstrings."""

    signature: str
    body: str


class Sources:
    """Look classes up in the sources of one installed release."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Return the classes below ``deepspeed/runtime`` by name."""
        found: dict[str, ast.ClassDef] = {}
        for path in sorted((self.directory / "deepspeed" / "runtime").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, node)
        return found

    def family(self, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and what it inherits from, as far as the names are found."""
        node = self.classes.get(name)
        if node is None:
            return
        yield node
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != name:
                yield from self.family(base.id)

    def method(self, owner: str, name: str) -> Method | None:
        """Return a method, inherited ones too."""
        plain = _demangled(name)
        for node in self.family(owner):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == plain:
                    return Method(f"({ast.unparse(member.args)})", _hash(member))
        return None

    def has(self, owner: str, name: str) -> bool:
        """Say whether a class has a method, or assigns an attribute to its instances."""
        return self.method(owner, name) is not None or any(
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr == _demangled(name)
            for member in self.family(owner)
            for node in ast.walk(member)
        )


def _demangled(name: str) -> str:
    return re.sub(r"^_[A-Za-z0-9]\w*?(?=__[a-z])", "", name)


def _hash(function: ast.FunctionDef) -> str:
    statements = [
        ast.dump(statement)
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()[:12]


def declared() -> tuple[dict[tuple[str, str], str], set[tuple[str, str]]]:
    """Return what the adapters rely on: methods, each with its points, and attributes."""
    methods: dict[tuple[str, str], str] = {
        (ENGINE, name): "backward passes and steps"
        for name in (*select.ENGINE_METHODS, *select.TENSOR_BACKWARD_METHODS)
    }
    attributes: set[tuple[str, str]] = set()
    for adapter in select.ADAPTERS:
        owners = {"engine": ENGINE, "optimizer": adapter.optimizer_class}
        if adapter.any_subclass:
            del owners["optimizer"]  # torch's own
        for probe in adapter.probes:
            if probe.owner not in owners:
                continue  # torch's own optimizer
            place = (owners[probe.owner], probe.method)
            points = dict.fromkeys([*filter(None, methods.get(place, "").split(", ")), probe.point])
            methods[place] = ", ".join(points)
            attributes |= {(adapter.optimizer_class, name) for name in probe.attributes}
        if adapter.any_subclass:
            continue
        attributes |= {(adapter.optimizer_class, name) for name in adapter.attributes}
        for name in select.OPTIMIZER_METHODS:
            methods.setdefault((adapter.optimizer_class, name), "steps")
    return methods, attributes - set(methods)


def drift(before: Sources, after: Sources) -> list[dict[str, str]]:
    """Return what differs: owner, name, points, and what happened to it."""
    methods, attributes = declared()
    found = []
    for (owner, name), points in sorted(methods.items()):
        one, other = before.method(owner, name), after.method(owner, name)
        change = _change(one, other)
        if change is not None:
            found.append({"owner": owner, "name": name, "points": points, "change": change})
    for owner, name in sorted(attributes):
        had, has = before.has(owner, name), after.has(owner, name)
        if had != has:
            change = "attribute added" if has else "attribute removed"
            found.append({"owner": owner, "name": name, "points": "", "change": change})
    return found


def _change(one: Method | None, other: Method | None) -> str | None:
    if one == other:
        return None
    if one is None or other is None:
        return "removed" if other is None else "added"
    if one.signature != other.signature:
        return f"signature {one.signature} to {other.signature}"
    return "body"


def main(arguments: list[str]) -> None:
    """Print the drift between two directories, as JSON lines."""
    before, after = (Sources(Path(argument)) for argument in arguments)
    for entry in drift(before, after):
        print(json.dumps(entry))


if __name__ == "__main__":
    main(sys.argv[1:])
