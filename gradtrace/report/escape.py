"""Make text that comes from a trace safe to show: parameter names are strangers' words."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace every character that could move a cursor, hide or reorder text by a visible escape.

    That is controls, invisible and direction-changing characters, separators other than the space,
    and lone surrogates. Newlines are among them: what is shown stays on the line it was put on.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
