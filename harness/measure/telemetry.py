"""The state of a device around a measurement: clocks, power, temperature, throttling, company.

NVIDIA through NVML (nvidia-ml-py), AMD through amdsmi where that is installed. `snapshot` returns
None where neither answers, as on a CPU; a field that the driver refuses is None. Clocks are in
MHz, power in W, temperature in degrees C. Reads only: no setting is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

Snapshot = dict[str, Any]

# NVML's clock event reasons that mean the device runs slower than asked for. Idle, application
# clocks, sync boost and display settings are choices, not throttling (nvml.h,
# nvmlClocksEventReason*).
THROTTLE_BITS = {
    0x0000000000000004: "sw_power_cap",
    0x0000000000000008: "hw_slowdown",
    0x0000000000000020: "sw_thermal",
    0x0000000000000040: "hw_thermal",
    0x0000000000000080: "hw_power_brake",
}


def _try(read: Callable[[], Any]) -> Any:
    """A field, or None where the driver or the virtual machine does not offer it."""
    try:
        return read()
    except Exception:  # NVML raises one class per error code; any of them means: not available
        return None


def _nvidia(index: int) -> Snapshot | None:
    try:
        import pynvml as nv

        nv.nvmlInit()
    except Exception:  # no package, no driver library, or no permission
        return None
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    handle = _try(lambda: nv.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
    if handle is None:  # CUDA_VISIBLE_DEVICES renumbers devices, so the index is second best
        handle = _try(lambda: nv.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return None
    reasons = _try(lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    pids = _try(lambda: sorted(p.pid for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)))
    power = _try(lambda: nv.nvmlDeviceGetPowerUsage(handle))
    driver = _try(nv.nvmlSystemGetDriverVersion)
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "sm_mhz": _try(lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)),
        "mem_mhz": _try(lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM)),
        "default_sm_mhz": _try(
            lambda: nv.nvmlDeviceGetDefaultApplicationsClock(handle, nv.NVML_CLOCK_SM)
        )
        or _try(lambda: nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM)),
        "power_w": None if power is None else power / 1000,
        "temperature_c": _try(lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),
        "throttle": None
        if reasons is None
        else [name for bit, name in THROTTLE_BITS.items() if reasons & bit],
        "pids": pids,
    }


def _amd(index: int) -> Snapshot | None:
    try:
        import amdsmi

        amdsmi.amdsmi_init()
        handle = amdsmi.amdsmi_get_processor_handles()[index]
    except Exception:  # as above
        return None
    gfx = _try(lambda: amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.GFX)) or {}
    mem = _try(lambda: amdsmi.amdsmi_get_clock_info(handle, amdsmi.AmdSmiClkType.MEM)) or {}
    power = _try(lambda: amdsmi.amdsmi_get_power_info(handle)) or {}
    hot = _try(
        lambda: amdsmi.amdsmi_get_temp_metric(
            handle, amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
        )
    )
    pids = _try(lambda: sorted(p["pid"] for p in amdsmi.amdsmi_get_gpu_process_list(handle)))
    driver = _try(lambda: amdsmi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    return {
        "driver": driver,
        "sm_mhz": gfx.get("clk"),
        "mem_mhz": mem.get("clk"),
        "default_sm_mhz": gfx.get("max_clk"),
        "power_w": power.get("current_socket_power"),
        "temperature_c": hot,
        "throttle": None,
        "pids": pids,
    }


def snapshot(device: torch.device | str) -> Snapshot | None:
    """The device's state now, or None for a CPU or where no management library answers."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _amd(index) if torch.version.hip else _nvidia(index)


def throttled(state: Snapshot | None, fraction: float) -> bool:
    """Whether the clock under load is below `fraction` of the default clock."""
    if not state or not state.get("sm_mhz") or not state.get("default_sm_mhz"):
        return False
    return bool(state["sm_mhz"] < fraction * state["default_sm_mhz"])


def others(state: Snapshot | None, siblings: Iterable[int] = ()) -> int:
    """How many strangers share the device. `siblings` are known to be idle, and so is the family.

    In a container the listed ids may belong to another pid namespace. Then our own id is not
    among them, and one unknown process is taken to be this one.
    """
    pids = set((state or {}).get("pids") or ())
    if os.getpid() not in pids:
        return max(0, len(pids - set(siblings)) - 1)
    strangers = pids - {os.getpid(), *siblings}
    return len(strangers - family()) if strangers else 0


def family() -> set[int]:
    """This process's ancestors, and the other workers of the harness process that started it.

    Workers of one sweep hold a context each but measure in turn; two sweeps started by one shell
    are strangers.
    """
    import psutil

    me = psutil.Process()
    found = {p.pid for p in me.parents()}
    parent = me.parent()
    try:
        words = parent.cmdline() if parent else []
        if parent and any(w == "harness" or w.startswith("harness.") for w in words):
            found |= {p.pid for p in parent.children(recursive=True)}
    except psutil.Error:  # the parent has ended
        pass
    return found | {me.pid}


def driver_major(state: Snapshot | None) -> str | None:
    """`580` of `580.159.04`: what must agree before two times are compared."""
    driver = (state or {}).get("driver")
    return str(driver).split(".")[0] if driver else None
