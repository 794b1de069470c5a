"""Take out of a trace's texts what a stranger need not know: paths, hosts, secrets.

What a parameter, a unit or a package is called stays: without names nothing can be found again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

PATH: Final = "(path)"
SECRET: Final = "(removed)"
_NAMES: Final = frozenset({"param", "name", "aliases", "also", "unit", "law", "point", "dtype"})
_SECRET: Final = re.compile(r"token|secret|passw|credential|api_?key|auth", re.IGNORECASE)
# A word with a slash between letters, from the root, from home or of a drive; "1/4" and "a / b" are none.
_WORD: Final = re.compile(r"[^\s'\"(),;=]*[\w.~:-]?[/\\][^\s'\"(),;]*")
_FRACTION: Final = re.compile(r"[-+.\d/]*")


def scrub(value: Any, known: Mapping[str, str]) -> Any:
    """Return a JSON value without paths, secrets and the words that are known to be private.

    Args:
        value: of JSON's types.
        known: word -> what stands for it, such as a host name.
    """
    if isinstance(value, str):
        return scrub_text(value, known)
    if isinstance(value, Mapping):
        return {key: _member(key, member, known) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(member, known) for member in value]
    return value


def _member(key: str, member: Any, known: Mapping[str, str]) -> Any:
    if _SECRET.search(key) and isinstance(member, str):
        return SECRET
    return member if key in _NAMES else scrub(member, known)


def scrub_text(text: str, known: Mapping[str, str]) -> str:
    """Return a text without paths and the words that are known to be private."""
    for word in sorted(known, key=len, reverse=True):
        if word:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", known[word], text)
    return _WORD.sub(_replace, text)


def _replace(match: re.Match[str]) -> str:
    word = match[0]
    bare = word.strip(".:")
    return word if bare in ("/", "\\") or _FRACTION.fullmatch(bare) else PATH
