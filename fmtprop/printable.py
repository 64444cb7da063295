"""Text from files and models, made safe to print."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Return text with every character that is not to be seen written as its escape.

    Names come from files that somebody else wrote: one of them could move the cursor, recolour the terminal or break
    a line of a table in two.

    Examples
    --------
    >>> print(printable("conv_1"), printable("\x1b[31mred\n"))
    conv_1 \x1b[31mred\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
