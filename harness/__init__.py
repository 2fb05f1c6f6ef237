"""Whether prepared weights are right, how fast that was, and what changed: `python -m harness`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # where conf, results, reports and docs are


class UsageError(ValueError):
    """A command line, config or file that cannot be used: one sentence, exit code 4."""


def suggest(name: str, known: list[str]) -> str:
    """The tail of an error about an unknown name: the close matches, then the whole list."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    return f"{hint} known: {', '.join(sorted(known))}"
