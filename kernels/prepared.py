"""A prepared layer as one value: its tensors, the layouts they are in, and the tag a consumer
checks.

It can be updated in place after preparation. `update_` takes reloaded checkpoint weights,
`rearrange_` moves whole experts (expert-parallel load balancing). Both write into the storage that
is there, so pointers stay and the views that kernels hold, and CUDA graphs captured, see the
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.errors import LayoutError
from kernels.layout import Layout
from kernels.shard import ShardPlan
from kernels.weights import PREPARED_MARK, MoEWeights

# Tensors whose first axis is this rank's experts, which move with them.
PER_EXPERT = (
    "w13_weight", "w13_scale", "w2_weight", "w2_scale", "w13_bias", "w2_bias",
    "w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale",
)  # fmt: skip


@dataclass(frozen=True)
class PreparedLayer:
    """What one backend consumes, for one rank.

    tensors: storage, expert-major and contiguous. layouts: the byte order of each. logical: the (n,
    k) that this rank owns of the checkpoint, per expert. padded: the (n, k) that went into the
    layout. views: what the kernel addresses, sharing storage with `tensors`. row_order: how the
    rows of w13 stand before the layout: `gate|up`, `up|gate`, `pairs` (gate0, up0, gate1, ...) or
    `plain`. constraints: kernel flags that this form needs. num_warps: of a Hopper scale layout,
    else None. options: how it was made, so that a reload is made the same way.
    """

    path: str
    target: str
    impl: str
    tensors: dict[str, torch.Tensor]
    layouts: dict[str, Layout]
    logical: dict[str, tuple[int, int]]
    padded: dict[str, tuple[int, int]]
    views: dict[str, torch.Tensor]
    row_order: str
    constraints: dict[str, Any]
    num_warps: int | None
    plan: ShardPlan
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in (*self.tensors.items(), *self.views.items()):
            layout = self.layouts.get(name)
            setattr(tensor, PREPARED_MARK, layout.name if layout else self.path)

    def require(self, tensor: str, layout: Layout, num_warps: int | None = None) -> torch.Tensor:
        """The tensor, once it is in the layout that a consumer reads; LayoutError names both."""
        if tensor not in self.tensors:
            raise LayoutError(
                f"path {self.path!r} holds no {tensor!r}; it has {', '.join(self.tensors)}"
            )
        have = self.layouts[tensor]
        if have != layout or dict(have.sizes) != dict(layout.sizes):
            raise LayoutError(
                f"{tensor}: the consumer reads layout {layout.name!r}, but this layer was prepared "
                f"as {have.name!r} for {self.target} at tp_size {self.plan.tp_size}; prepare "
                "it again"
            )
        if "w" in layout.sizes and num_warps not in (None, self.num_warps):
            raise LayoutError(
                f"{tensor}: the consumer runs {num_warps} warps, but the scales were swizzled for "
                f"{self.num_warps}; the bytes depend on it"
            )
        return self.tensors[tensor]

    def update_(self, weights: MoEWeights) -> PreparedLayer:
        """Prepare reloaded checkpoint weights as before and write them into this layer's storage.

        Every pointer and view stays valid. Raises LayoutError, with nothing written, when the
        weights are not of the same layer. Holds a second prepared layer while it runs.
        """
        from kernels.prepare import prepare

        fresh = prepare(self.path, weights, target=self.target, impl=self.impl, **self.options)
        for name, tensor in self.tensors.items():
            new = fresh.tensors.get(name)
            if new is None or new.shape != tensor.shape or new.dtype != tensor.dtype:
                shape = None if new is None else tuple(new.shape)
                raise LayoutError(
                    f"update_: {name} is {tuple(tensor.shape)} here and {shape} in the new "
                    "weights; a layer is updated from the same tensors that it was prepared from"
                )
        for name, tensor in self.tensors.items():
            tensor.copy_(fresh.tensors[name])
        return self

    def rearrange_(self, sources: Sequence[int]) -> PreparedLayer:
        """Place e then holds what expert sources[e] held, in every tensor, in place.

        `sources` has one entry per local expert; repeats are copies (redundant experts). At most
        one expert of one tensor is held beside it.
        """
        experts = self.plan.expert_count
        if len(sources) != experts or not all(0 <= s < experts for s in sources):
            raise LayoutError(
                f"rearrange_: sources {list(sources)} must give, for each of {experts} local "
                "experts, one of them"
            )
        for name in PER_EXPERT:
            if name in self.tensors:
                _move_experts(self.tensors[name], list(sources))
        return self


def _move_experts(storage: torch.Tensor, sources: list[int]) -> None:
    """storage[e] = old storage[sources[e]] along the first axis, with one expert of scratch."""
    pending = {e: s for e, s in enumerate(sources) if s != e}
    readers = [0] * len(sources)
    for source in pending.values():
        readers[source] += 1
    ready = [e for e in pending if not readers[e]]
    while pending:
        if not ready:  # only cycles are left: keep one expert, so its place is free
            first = next(iter(pending))
            kept, at = storage[first].clone(), first
            while pending[at] != first:
                storage[at].copy_(storage[pending[at]])
                at = pending.pop(at)
            storage[at].copy_(kept)
            del pending[at]
            continue
        at = ready.pop()
        source = pending.pop(at)
        storage[at].copy_(storage[source])
        readers[source] -= 1
        if not readers[source] and source in pending:
            ready.append(source)


@contextmanager
def constrained(
    layer: PreparedLayer,
    update: Callable[[dict[str, Any]], None],
    reset: Callable[[], None],
) -> Iterator[None]:
    """Hold a layer's kernel constraints for a block, and release them after it, whatever happens.

    update, reset: the consumer's own, such as triton_kernels' update_opt_flags_constraints and
    reset_opt_flags_constraints, which set a flag for the whole process: left in place, split_k=1 of
    one layer would bind every later matmul.
    """
    update(dict(layer.constraints))
    try:
        yield
    finally:
        reset()
