"""How much more than its tensors a run reserves: a plan's allocations, replayed in a model of CUDA's caching allocator.

    python benchmarks/allocator_segments.py

The plan adds a share of the peak for fragmentation (FRAGMENTATION in titanlite/tools/plan/planner.py). This replays
every allocation of two steps of the unfolded dry run, first with expandable segments and then without, by the rules of
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management and torch's CUDACachingAllocator.cpp:

- Sizes are multiples of 512 bytes. Up to 1 MiB they come from a pool of their own.
- The best fit is taken, and split if 512 bytes are left, or of large blocks in segments more than 1 MiB.
- A segment has 2 MiB in the small pool; in the large one 20 MiB, or from 10 MiB on the size in multiples of 2 MiB. An
  expandable segment grows at its end by pages of 2 or 20 MiB.
- Nothing is given back.

All allocations are of one stream. FSDP's all-gathers have streams and so blocks of their own, which reserves more.

Prints a line per config: the peak of the tensors, and by how much more is reserved.
"""

import bisect
import json
from pathlib import Path

from titanlite import config
from titanlite.config.stage_split import module_names
from titanlite.tools.plan import planner
from titanlite.tools.plan.op_trace import Memory

MIB, GIB = 2**20, 2**30
ROOT = Path(__file__).resolve().parent.parent
EAGER, FULL = "--compile.enable=false", "--activation_checkpoint.mode=full"
CASES = {
    "llama3_8b, compiled": ("llama3_8b", []),
    "llama3_8b, eager": ("llama3_8b", [EAGER]),
    "llama3_8b, eager, full AC": ("llama3_8b", [EAGER, FULL]),
    "llama3_8b, eager, no AC": ("llama3_8b", [EAGER, "--activation_checkpoint.mode=none", "--training.seq_len=4096"]),
    "llama2_13b, TP 2": ("llama2_13b", []),
    "qwen3_30b_a3b, experts": ("qwen3_30b_a3b", []),
}


class Block:
    """Part of a segment. `before` and `after` are its neighbours in the segment."""

    def __init__(self, address: int, size: int, before: "Block | None" = None, after: "Block | None" = None):
        self.address, self.size, self.before, self.after, self.free = address, size, before, after, False


class Allocator:
    """One stream's pool of blocks. `reserved`: bytes of all segments."""

    def __init__(self, *, small: bool, expandable: bool):
        self.small, self.expandable, self.reserved = small, expandable, 0
        self.unused: list[tuple[int, int, Block]] = []  # by size and address
        self.last: Block | None = None  # of the expandable segment

    def _add(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.unused, (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        del self.unused[bisect.bisect_left(self.unused, (block.size, block.address))]
        block.free = False

    def allocate(self, size: int) -> Block:
        """Return a block of at least so many bytes."""
        place = bisect.bisect_left(self.unused, (size, -1))
        if place < len(self.unused):
            block = self.unused[place][2]
            self._take(block)
        else:
            block = self._grow(size) if self.expandable else self._segment(size)
        rest = block.size - size
        if rest >= 512 if self.small or self.expandable else rest > MIB:
            remainder = Block(block.address + size, rest, block, block.after)
            if block.after:
                block.after.before = remainder
            elif self.expandable:
                self.last = remainder
            block.size, block.after = size, remainder
            self._add(remainder)
        return block

    def _segment(self, size: int) -> Block:
        length = 2 * MIB if self.small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += length
        return Block(self.reserved - length, length)

    def _grow(self, size: int) -> Block:
        page = (2 if self.small else 20) * MIB
        block = self.last if self.last and self.last.free else None
        if block:
            self._take(block)
        else:
            block = Block(self.reserved, 0, self.last)
            if self.last:
                self.last.after = block
            self.last = block
        length = -(-(size - block.size) // page) * page
        self.reserved += length
        block.size += length
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        for other in (block.before, block.after):
            if other and other.free:
                self._take(other)
                block.size += other.size
                if other is block.before:
                    block.address = other.address
                    block.before = other.before
                    if other.before:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after:
                        other.after.before = block
                    elif self.last is other:
                        self.last = block
        self._add(block)


def replay(changes: list[tuple[int, int]], *, expandable: bool) -> tuple[int, int]:
    """Return the peak of the tensors and what is reserved, in bytes, of changes (allocation, bytes) in order."""
    pools = {small: Allocator(small=small, expandable=expandable) for small in (True, False)}
    sizes: dict[int, int] = {}
    blocks: dict[int, tuple[bool, Block]] = {}
    used = peak = 0
    for key, change in changes:
        if key in blocks:
            small, block = blocks.pop(key)
            pools[small].release(block)
            used -= -(-sizes[key] // 512) * 512
        sizes[key] = sizes.get(key, 0) + change
        if sizes[key]:
            size = -(-sizes[key] // 512) * 512
            small = size <= MIB
            blocks[key] = small, pools[small].allocate(size)
            used += size
            peak = max(peak, used)
    return peak, sum(pool.reserved for pool in pools.values())


def changes_of(name: str, options: list[str]) -> list[tuple[int, int]]:
    """Return all changes of memory of a rank's first two steps, by the allocation."""
    loaded = config.load([str(ROOT / "configs" / f"{name}.toml"), "--plan.device=h200", *options])
    resolved, _, _ = planner.resolve(loaded)
    names = [module_names(resolved.model.n_layers)]
    (run,) = planner._dry_run_stages(resolved, names, [0], fold=False, show_progress=False)
    phases = [[("begin",)], [key for key in run.phases if key[0] in "FB"], [("update",)]]
    order = phases[0] + 2 * (sorted(phases[1], key=lambda key: (key[1], "FB".index(key[0]))) + phases[2])
    events = [event for key in order for segment in run.phases[key] for event in segment.events]
    return [(id(event.allocation), event.change) for event in events if isinstance(event, Memory)]


def main() -> None:
    for label, (name, options) in CASES.items():
        changes = changes_of(name, options)
        row: dict[str, object] = {"config": label, "changes": len(changes)}
        for kind, expandable in (("expandable", True), ("segments", False)):
            peak, reserved = replay(changes, expandable=expandable)
            row |= {"peak GiB": round(peak / GIB, 2), kind: round(reserved / peak - 1, 4)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
