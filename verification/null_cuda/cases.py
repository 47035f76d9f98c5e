"""The cases of the parity tests as CUDA runs them: in bfloat16, with inductor and the attention and the products of a
GPU."""

from typing import Any

from tests import test_families
from tests.parallel import test_layouts, test_parity
from tests.parallel.test_layouts import with_batches, world_size
from tests.techniques import test_gpt_oss, test_mla, test_qk_clip
from tests.techniques.moe import test_moe

ON_CUDA = {
    "training__dtype": "float32",
    "training__seq_len": 64,
    "model__dim": 128,  # attention on CUDA takes heads of multiples of 8 channels
    "model__n_heads": 8,
    "model__ffn_dim": 256,
}
LARGER = {key: value for key, value in ON_CUDA.items() if isinstance(value, int)}
MOST_RANKS = 8
NOT_ON_CUDA = ("cpu backend",)


def layouts() -> dict[str, dict[str, Any]]:
    """Return the options of each case by name, those of few ranks first."""
    cases: dict[str, dict[str, Any]] = {}
    for title, module, common in (
        ("", test_layouts, {}),
        ("experts, ", test_moe, test_moe.EXPERTS | {"model__moe__expert_dim": 64}),
        ("latent attention, ", test_mla, {}),
        ("families, ", test_families, {}),
        ("gpt-oss, ", test_gpt_oss, test_gpt_oss.GPT_OSS | {"model__moe__expert_dim": 64}),
        ("QK-clip, ", test_qk_clip, test_qk_clip.CLIP),
    ):
        cases |= {f"{title}{name}": common | layout for name, layout in module.LAYOUTS.items()}
    for name, layout in test_layouts.LOW_PRECISION.items():
        real = layout.get("float8__recipe") != "mxfp8"  # which only Blackwell has
        cases[name] = {key: value for key, value in layout.items() if not (real and key == "float8__emulate")}
    for name in ("one rank", "tp 2", "replicate 2", "ZBVZeroBubble 2", "Interleaved1F1B 2"):
        cases[f"bfloat16, {name}"] = test_layouts.LAYOUTS[name] | {"training__dtype": "bfloat16"}
    cases = {name: layout for name, layout in cases.items() if world_size(layout) <= MOST_RANKS}
    cases = {name: layout for name, layout in cases.items() if not name.endswith(NOT_ON_CUDA)}
    return dict(sorted(cases.items(), key=lambda case: world_size(case[1])))


def case(layout: dict[str, Any], *, steps: int = 3) -> dict[str, Any]:
    """Return a case for the server."""
    options = ON_CUDA | with_batches(layout)
    options.pop("compile__backend", None)
    options |= {key: max(value, options[key]) for key, value in LARGER.items() if key != "model__n_heads"}
    if "model__head_dim" in options:
        options["model__head_dim"] = 16
    if options["training__dtype"] == "float64":
        options["training__dtype"] = "float32"
    arguments = test_parity.arguments_of(options)
    return {"world_size": world_size(layout), "config": test_parity.SMALL, "arguments": arguments, "steps": steps}
