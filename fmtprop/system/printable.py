"""Text from files and models, made safe to print."""

from __future__ import annotations

__all__ = ["printable", "printable_lines", "shortened"]


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


def printable_lines(text: str, most: int) -> str:
    r"""Return the same of a text of several lines, which stay lines.

    Parameters
    ----------
    text : str
        Maybe with names in it that are megabytes long.
    most : int
        Characters from which its middle is left out.

    Examples
    --------
    >>> print(printable_lines("one\ntwo\t", 10))
    one
    two\t
    """
    return "\n".join(map(printable, shortened(text, most).split("\n")))


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it has more characters than that.

    Examples
    --------
    >>> shortened("abcdefghijklmnop", 10)
    'abcde...op'
    """
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"
