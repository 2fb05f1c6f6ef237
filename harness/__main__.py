"""`python -m harness <command> [Hydra overrides]`: imports only the module of that command.

Exit codes, everywhere: 0 passed; 1 regression; 2 wrong bytes or numbers; 3 coverage lost, or
nothing verified; 4 harness or usage error.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from harness import UsageError, suggest

COMMANDS: dict[str, tuple[str, str]] = {
    "sweep": (
        "harness.run.sweep",
        "run a grid of cells: checks, digests, time, memory, code, bound",
    ),
    "gate": ("harness.gate.command", "compare a run with a baseline and fail on what got worse"),
    "compare": (
        "harness.compare.targets",
        "say what differs between targets, versions or implementations",
    ),
    "report": ("harness.report", "write the page, the tables and the figures of a run"),
    "show": ("harness.show", "show a layout: its pattern, its padding, where an element goes"),
    "list": ("harness.plan.listing", "list every axis of a sweep and its values"),
    "env": ("harness.env.envs", "build or check the version environments of env="),
    "bench": ("harness.measure.bench", "time routines on this machine's device"),
    "checkpoint": (
        "harness.run.checkpoint",
        "write a small FP4 checkpoint of each kind, for source=",
    ),
}

EXAMPLES = """\
examples:
  python -m harness sweep hw=b200
  python -m harness sweep hw=gfx950,h200 model=gpt_oss_120b tp_size=1,2,4,8 impl=reference,fused
  python -m harness sweep hw=b200 source=safetensors source.path=FILE_OR_DIR source.layer=0
  python -m harness show layout=hopper_scale shape=5760x90 at=17,3

exit codes: 0 passed, 1 regression, 2 wrong bytes or numbers, 3 coverage lost or nothing verified,
            4 harness or usage error"""


def usage() -> str:
    lines = ["usage: python -m harness <command> [overrides, in Hydra's grammar]", "", "commands:"]
    lines += [f"  {name:<11}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join([*lines, "", EXAMPLES])


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 4
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"harness: no command {name!r}{suggest(name, list(COMMANDS))}", file=sys.stderr)
        return 4
    module = COMMANDS[name][0]
    try:
        command = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"harness {name}: this checkout has no module {module}", file=sys.stderr)
        return 4
    try:
        return int(command.main(rest))
    except UsageError as error:
        print(f"harness {name}: {error}", file=sys.stderr)
        return 4
    except BrokenPipeError:  # `| head` closed the pipe: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 4
    except Exception:  # a fault of the harness must not read as exit 1, a regression
        traceback.print_exc()
        print(f"harness {name}: failed, see the trace above", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
