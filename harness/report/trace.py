"""Numbers that say where they come from, and how numbers are written.

A `Number` on the page carries a source: `RUN:LINE:path` (one value of one row), `ratio:A/B` (two
of those), `slope:A,B,...` (fit of time against experts), or `count:field=value&...` over
all rows (URL-encoded; `|` between alternatives).
Text is a list of strings and Numbers; `plain` joins it for Markdown, the page's template marks each
Number with its source, and a test looks numbers up in rows.jsonl by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from urllib.parse import urlencode

Text = Sequence["str | Number"]


@dataclass(frozen=True)
class Number:
    """A value as written, with its source."""

    text: str
    src: str


def plain(text: Text) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in text)


def digits(value: float, significant: int = 3) -> str:
    """A plain decimal, its whole digits kept: 0.0123, 4.57, 1234."""
    if value == 0:
        return "0"
    places = max(0, significant - 1 - floor(log10(abs(value))))
    return f"{value:.{places}f}"


def duration(us: float) -> str:
    """Microseconds with the unit a reader expects."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{digits(us / size)} {unit}"
    return f"{digits(us)} µs"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{digits(count / step)} {unit}"
    return f"{count:.0f} B"


def count(value: int, **where: str) -> Number:
    """A number of rows, with the condition that they meet."""
    return Number(str(value), "count:" + urlencode(where, safe="|"))


def say(template: str, *parts: str | Number) -> Text:
    """The template with each {} replaced by a part; Numbers stay Numbers."""
    pieces = template.split("{}")
    mixed: list[str | Number] = [pieces[0]]
    for part, piece in zip(parts, pieces[1:], strict=True):
        mixed += [part, piece]
    return mixed
