"""Text from files and models, made safe to print."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


def printable(text: str) -> str:
    r"""Return text in which every invisible character is written as its escape.

    Names come from other people's files: a name could move the cursor, change the terminal's colours or break a line
    of a table in two.

    >>> print(printable("conv_1"), printable("\x1b[31mred\n"))
    conv_1 \x1b[31mred\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str, most: int) -> str:
    r"""Return the same for a text of several lines, and keep its line breaks.

    >>> print(printable_lines("one\ntwo\t", 10))
    one
    two\t
    """
    return "\n".join(map(printable, shortened(text, most).split("\n")))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or its class where it has none.

    >>> first_line(ValueError("too small\nat ...")), first_line(KeyError())
    ('too small', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shortened(text: str, most: int) -> str:
    """Return a text; if it has more than `most` characters, without its middle.

    >>> shortened("abcdefghijklmnop", 10)
    'abcde...op'
    """
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Return the lines of a table: all columns but the last have the width of their longest cell.

    >>> aligned([("a", "1"), ("long", "2")])
    ['a     1', 'long  2']
    """
    shown = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*shown, fillvalue="")]
    lines = (gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in shown)
    return [line.rstrip() for line in lines]
