"""What a compiler and an occupancy bound need to know of each architecture: a literal table.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (registers,
warps, blocks and shared memory a multiprocessor; 1 KiB of shared memory a block is the system's);
AMD CDNA 3, CDNA 4 and LLVM AMDGPU user guides (LDS a compute unit, 4 SIMDs, wavefront size); memory
transactions are 32-byte sectors in 128-byte lines on NVIDIA, 128-byte lines read as 64-byte halves
on CDNA.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness import UsageError, suggest


@dataclass(frozen=True)
class Chip:
    """backend: triton's. shared: bytes a multiprocessor or compute unit. sectors: memory segment
    sizes in bytes that a warp's access is counted in; the first is the smallest transaction."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    warps: int
    blocks: int
    sectors: tuple[int, ...]
    reserved: int = 0

    def occupancy(
        self, registers: int, shared: int, num_warps: int, waves_per_simd: int | None = None
    ) -> dict[str, int | str]:
        """How many blocks fit at once, and what limits them: a bound from resources, not a time.

        registers: a thread's. waves_per_simd: the AMD compiler's own answer for registers.
        """
        limits = {"blocks": self.blocks, "warps": self.warps // num_warps}
        if self.backend == "cuda":
            a_warp = -(-registers * 32 // 256) * 256  # registers are given out by 256
            limits["registers"] = 65536 // (a_warp * num_warps) if registers else self.blocks
        elif waves_per_simd is not None:
            limits["registers"] = waves_per_simd * 4 // num_warps
        if shared:
            limits["shared"] = self.shared // (shared + self.reserved)
        name = min(limits, key=lambda n: limits[n])
        return {"blocks": limits[name], "warps": limits[name] * num_warps, "limit": name}


_NVIDIA, _AMD = (32, 64, 128), (64, 128)
CHIPS: dict[str, Chip] = {
    "sm80": Chip("cuda", 80, 32, 167936, 64, 32, _NVIDIA, 1024),
    "sm90": Chip("cuda", 90, 32, 233472, 64, 32, _NVIDIA, 1024),
    "sm100": Chip("cuda", 100, 32, 233472, 64, 32, _NVIDIA, 1024),
    "sm103": Chip("cuda", 103, 32, 233472, 64, 32, _NVIDIA, 1024),
    "sm120": Chip("cuda", 120, 32, 102400, 48, 24, _NVIDIA, 1024),
    "gfx942": Chip("hip", "gfx942", 64, 65536, 32, 32, _AMD),
    "gfx950": Chip("hip", "gfx950", 64, 163840, 32, 32, _AMD),
    "gfx1250": Chip("hip", "gfx1250", 32, 327680, 64, 32, _AMD),
}


def chip(arch: str) -> Chip:
    """The chip of an architecture string; UsageError names the known ones."""
    if arch not in CHIPS:
        raise UsageError(f"no compiler target {arch!r}{suggest(arch, list(CHIPS))}")
    return CHIPS[arch]
