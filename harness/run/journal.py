"""A run folder while it is written: one writer, whole rows, a state that says how it ended.

`rows.jsonl` grows by whole lines, each written by one call; a line that a kill or a full disk tore
is cut off when the run is taken up again. `state.json` says running, done or interrupted.
A lock keeps a second sweep out of the folder, and goes with the process that held it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from harness import UsageError, rows


class Journal:
    """The open journal of a run folder. UsageError when another process writes it, or it cannot
    be written; `RowsLost` from `append` when a row could not be kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "rows.jsonl"
        try:
            self._lock: IO[bytes] = (folder / ".lock").open("ab")
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._whole = self._cut_torn_line()
        except OSError as error:
            self._lock.close()
            if isinstance(error, BlockingIOError):
                raise UsageError(f"{folder} is being written by another sweep") from None
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Keeps a row: once this returns, a kill of this process cannot lose it."""
        try:
            rows.append(self.file, row)
            self._whole = self.file.stat().st_size
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.file, self._whole)  # the part of the row that went in
            kept = len(rows.read(self.file)) if self.file.is_file() else 0
            raise RowsLost(
                f"{self.file}: {error.strerror} after {kept} rows, which are kept; make room, "
                f"then: python -m harness sweep resume={self.folder.name}"
            ) from None

    def state(self, state: str) -> None:
        """Marks how the run stands, by replacing a whole file; a full disk keeps the old mark."""
        new = self.folder / ".state.json"
        with suppress(OSError):
            try:
                new.write_text(json.dumps({"state": state}) + "\n")
                new.replace(self.folder / "state.json")
            except OSError:
                new.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    def _cut_torn_line(self) -> int:
        """Drops what stands behind the last newline; the bytes before it."""
        if not self.file.is_file():
            return 0
        data = self.file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.file, whole)
        return whole


class RowsLost(UsageError):
    """A row could not be written; the sentence says what is safe and how to go on."""


def state_of(folder: Path) -> str:
    """running, done or interrupted; a run marked running whose writer is gone was interrupted."""
    try:
        state = str(json.loads((folder / "state.json").read_text())["state"])
    except (OSError, ValueError, KeyError):
        return "interrupted"
    if state != "running":
        return state
    try:
        with (folder / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:
        pass
    return "interrupted"
