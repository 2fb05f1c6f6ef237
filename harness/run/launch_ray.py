"""Batches as tasks of a Ray cluster.

    python -m harness.run.launch_ray FOLDER COUNT [hydra overrides]

Through Ray's own API, not a plugin: hydra-ray-launcher 1.2.2, the newest, wants `ray[default]`,
aiohttp and boto3 for its AWS half, and what is needed here is one remote function. Ray sets
CUDA_VISIBLE_DEVICES for a task that asks for a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from harness.run.launch import CONF, run_batch


def options(overrides: Sequence[str]) -> dict[str, Any]:
    """The preset conf/hydra/launcher/ray.yaml with what the command line changed."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("launch", [*overrides], return_hydra_config=True)
    return dict(whole.hydra.launcher)


def main(argv: Sequence[str]) -> int:
    import ray

    place, count, given = Path(argv[0]), int(argv[1]), options(argv[2:])
    local = given["address"] == "local"
    environ = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    ray.init(
        address=None if local else given["address"], log_to_driver=False,
        runtime_env={"env_vars": environ}, **({"include_dashboard": False} if local else {}),
    )  # fmt: skip
    wanted = {key: given[key] for key in ("num_cpus", "num_gpus")}
    task: Any = ray.remote(max_retries=0, **wanted)(run_batch)
    try:
        ray.get([task.remote(place, number) for number in range(count)])
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
