"""Compare the plan's memory of Llama 3 8B on one device with the peak of torch's allocator on the null CUDA.

    python -m tests.null_cuda.memory          prints a row for each option, after minutes

Tensors only: both leave out the CUDA context, and what the allocator reserves besides.
"""

import tempfile
from pathlib import Path

from tests.null_cuda.test_null_cuda import LARGE, ROOT, Server, of_8b
from titanlite import config
from titanlite.tools.plan.planner import make_plan

SELECTIVE = "--activation_checkpoint.mode=selective"
OPTIONS: dict[str, tuple[int, list[str]]] = {
    "no AC": (2, []),
    "not compiled": (2, ["--compile.enable=false"]),
    "full AC": (2, ["--activation_checkpoint.mode=full"]),
    "full AC, batch 8": (8, ["--activation_checkpoint.mode=full"]),
    "selective AC": (4, [SELECTIVE]),
    "selective AC, every second mm": (4, [SELECTIVE, "--activation_checkpoint.selective_ac_option=every_second_mm"]),
    "selective AC, float8": (4, [SELECTIVE, "--float8.enable"]),
    "selective AC, 8-bit optimizer states": (2, [SELECTIVE, "--optimizer.state_dtype=int8"]),
    "selective AC, Muon": (2, [SELECTIVE, "--optimizer.name=Muon"]),
    "selective AC, document mask": (2, [SELECTIVE, "--training.document_mask"]),
}
GIB = 2**30


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), PYTORCH_ALLOC_CONF="expandable_segments:True")
        print("| Llama 3 8B, 4,096 tokens, bfloat16 | batch | allocator, GiB | plan, GiB | difference |")
        print("| --- | --- | --- | --- | --- |")
        for name, (batch, options) in OPTIONS.items():
            steps = of_8b(*options, batch=batch, accumulation_steps=2)
            allocated = server.run(steps)[0][-1]["active"]
            loaded = config.load([str(ROOT / LARGE), *steps["arguments"], "--plan.device=h200"])
            planned = make_plan(loaded, world_size=1).worst.peak.total
            error = f"{100 * (planned / allocated - 1):+.1f} %"
            print(f"| {name} | {batch} | {allocated / GIB:.1f} | {planned / GIB:.1f} | {error} |", flush=True)
        server.close()


if __name__ == "__main__":
    main()
