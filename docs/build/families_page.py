"""Write docs/families.md from the tables of the package and of the tests, and from the log of the sweep over
transformers' model types.

    python -m docs.build.families_page          # the page
    python -m docs.build.families_page --sweep  # first the sweep, 10 minutes, into benchmarks/logs/model_types.log
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from docs.build.pages import table
from tests import test_families_by_options as by_options
from tests.techniques import test_gpt_oss, test_mla
from titanlite.config.hf.config_json import hf_config
from titanlite.config.hf.families import FAMILIES
from titanlite.config.model_sizes import SIZES
from titanlite.config.schema import Model

ROOT = Path(__file__).parents[2]
PAGE, LOG = ROOT / "docs" / "families.md", ROOT / "benchmarks" / "logs" / "model_types.log"
ADDS: dict[str, tuple[str, str]] = {
    "llama": ("Llama 1 to 3.3, SmolLM, SmolLM2, TinyLlama, Yi", "biases if the config has them"),
    "mistral": ("Mistral 7B, Nemo", "`sliding_window`; `head_dim` apart from width / heads"),
    "ministral": ("Ministral 8B", "windows in some layers (`layer_pattern`)"),
    "ministral3": ("Ministral 3 (text)", "YaRN; `llama4_scaling_beta` up to the original length"),
    "qwen2": ("Qwen2, Qwen2.5", "biases of q, k and v; windows in some layers"),
    "qwen3": ("Qwen3 (dense)", "norms of each head's queries and keys (`qk_norm`); windows in some layers"),
    "olmo2": ("OLMo 2", '`norm_placement = "after"`, norms of all heads together'),
    "olmo3": ("Olmo 3", "OLMo 2's norms; windows in three of four layers, YaRN in the others"),
    "smollm3": ("SmolLM3", "every fourth layer without rotary embedding (NoPE)"),
    "granite": ("Granite 3", "four factors: on embeddings, scores, residuals and logits"),
    "phi3": (
        "Phi-3, Phi-4, Phi-4-mini",
        "fused tensors, split when they are loaded; partial rotary embedding, LongRoPE",
    ),
    "glm": (
        "GLM-4 (`-hf` folders)",
        "partial rotary embedding of neighbouring channels, fused gate and up projections",
    ),
    "glm4": ("GLM-4-0414", 'GLM-4 with `norm_placement = "both"`'),
    "glm4_moe": ("GLM-4.5, 4.6", "partial rotary embedding; a router as DeepSeek-V3's, shared experts"),
    "seed_oss": ("Seed-OSS 36B", "biases of queries, keys and values; wide heads"),
    "stablelm": ("StableLM 2 1.6B, StableLM 3B", "LayerNorm, partial rotary embedding"),
    "starcoder2": ("StarCoder2", "LayerNorm, GELU, two projections in a feed-forward layer, biases"),
    "gpt2": ("GPT-2, GPT-3's architecture", "learned positions, LayerNorm, GELU, biases; transposed, fused tensors"),
    "gemma": ("Gemma 1", "norms that multiply by 1 + weight, GeGLU, a factor on embeddings"),
    "gemma3_text": ("Gemma 3 (text)", "Gemma's, norms before and after, norms of q and k, two rotary bases, windows"),
    "mixtral": ("Mixtral 8x7B, 8x22B", "[experts](moe.md) in every layer; `sliding_window`"),
    "qwen3_moe": ("Qwen3-30B-A3B, -235B-A22B, Coder", "experts in all layers, in every n-th, or after dense ones"),
    "olmoe": ("OLMoE-1B-7B", "experts in every layer; norms of all heads together"),
    "gpt_oss": (
        "gpt-oss-20b, -120b",
        "attention sinks; experts with biases, a bounded SwiGLU; windows in every second layer; MXFP4 is read",
    ),
    "deepseek_v2": ("DeepSeek-V2, V2-Lite", "DeepSeek-V3's attention; groups of experts by their best score"),
    "deepseek_v3": (
        "DeepSeek-V3, -R1, V3.1 (bfloat16), Moonlight, Kimi K2",
        "[latent attention](moe.md#multi-head-latent-attention); experts in groups, balance biases, shared experts",
    ),
}
"""Models of each model type, and what it adds to Llama's layers."""
HEAD = ["`model_type`", "models", "adds to Llama", "flavors", "layouts", "equal / rejected"]
TYPE_OF_CLASS = {name: family.architecture.lower() for name, family in FAMILIES.items()}


def flavors() -> dict[str, list[str]]:
    """Return the named sizes of each model type."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in SIZES:
        model = Model.model_validate({"flavor": name})
        config = hf_config(model, max_seq_len=1, torch_dtype="bfloat16", bos=None, eos=None)
        if name != "debug":
            found[config["model_type"]].append(f"`{name}`")
    return found


def layouts() -> dict[str, int]:
    """Return how many layouts of each model type the tests compare with one process, of those in one table."""
    found: dict[str, int] = defaultdict(int)
    for family, _ in by_options.CASES:
        start = family.split(",")[0]
        fitting = [name for name in TYPE_OF_CLASS if TYPE_OF_CLASS[name].startswith(start + "for")]
        fitting = fitting or [name for name in TYPE_OF_CLASS if TYPE_OF_CLASS[name].startswith(start)]
        found[fitting[0]] += 1
    return {**found, "gpt_oss": len(test_gpt_oss.LAYOUTS), "deepseek_v3": len(test_mla.LAYOUTS)}


def sweep() -> None:
    """Try the keys of every supported model type, and each other type once, and write what came out."""
    import transformers

    from tests.hf import test_model_types as model_types

    lines: list[dict[str, Any]] = [{"transformers": transformers.__version__, "types": len(model_types.types())}]
    for name in model_types.SWEPT:
        with tempfile.TemporaryDirectory() as folder:
            found = model_types.tried(name, Path(folder))
        lines.append({"model_type": name, **found})
        print(name, {key: len(values) for key, values in found.items()}, flush=True)
    for name in model_types.types():
        with tempfile.TemporaryDirectory() as folder:
            content = model_types.default_config(name)
            (Path(folder) / "config.json").write_text(json.dumps(content))
            problems = model_types.rejection(Path(folder))
        if content["model_type"] not in FAMILIES:
            has = problems[0].partition("unsupported: it has ")[2].partition("; supported")[0]
            lines.append({"unsupported": name, "lines": len(problems), "has": has})
    LOG.write_text("".join(json.dumps(line) + "\n" for line in lines))


def page() -> str:
    """Return the text of the page."""
    first, *lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    swept = {line["model_type"]: line for line in lines if "model_type" in line}
    others = [line for line in lines if "unsupported" in line]
    sizes, n_layouts = flavors(), layouts()
    rows = []
    for name, (models, adds) in ADDS.items():
        found, count = swept[name], n_layouts.get(name, 0)
        verified = str(count) if count else "[by option](reference/support.md)"
        tried = f"{len(found['equal'])} / {len(found['rejected'])}"
        rows.append([f"`{name}`", models, adds, ", ".join(sizes.get(name, [])) or "-", verified, tried])
    equal, rejected = (sum(len(line[key]) for line in swept.values()) for key in ("equal", "rejected"))
    different = sum(len(line["different"]) for line in swept.values())
    by_feature: dict[str, list[str]] = defaultdict(list)
    for line in others:
        by_feature[line["has"].partition(" (")[0].partition(",")[0] or "not named"].append(line["unsupported"])
    lacking = sorted(by_feature.items(), key=lambda item: -len(item[1]))
    feature_rows = [[has, str(len(names)), ", ".join(f"`{name}`" for name in names)] for has, names in lacking]
    return TEXT.format(
        families=table(HEAD, rows).strip(),
        n_families=len(ADDS),
        version=first["transformers"],
        n_types=first["types"],
        n_others=len(others),
        equal=equal,
        rejected=rejected,
        different=different,
        others=table(["what is named first", "types", "model types"], feature_rows).strip(),
    )


TEXT = """# Model families

One model file implements all families: each is a set of options of `[model]`. The training loop,
the parallelism and the checkpoints have no code for a single family, so each family can be trained
under every layout. `python -m docs.build.families_page` writes this page from tables in the package
and in the tests.

To train from initial weights, set `model.flavor` to a flavor in the table. To start from released
weights, set `model.flavor = "from_hf"` and name the model's folder
([Hugging Face](hugging_face.md)).

## The {n_families} families

{families}

The column "layouts" counts the layouts under which tests compare a model with the family's
options with a single process in float64 (tests/test_families_by_options.py). They compare the
losses, gradient norms, every gradient and every weight of three steps. The layouts are FSDP with
tensor parallel, a ring with documents, tensor x pipeline x context parallel, ring x Ulysses, a
zero-bubble schedule and, for families with experts, expert parallel. For families marked "by
option", the linked page says which layouts each option is tested under.

Tests of each family, with random weights, biases other than zero and norms other than one, show:

- In float64 the logits and every gradient equal those of transformers to 1e-12. transformers always
  computes norms, rotary tables and softmax in float32, so these tests make it compute them in
  float64. In float32 the tests change nothing in transformers, and logits and gradients are equal
  to rounding.
- If a folder that transformers has written is loaded and exported again, every tensor is the same
  bit for bit, and transformers computes the same logits from the exported folder.
- titanlite and transformers generate the same texts greedily, token for token.

## Options of layers

`model.layer_pattern` is a list of TOML tables, each for `count` consecutive layers of one kind. The
list repeats over the layers, and its last repetition may end early. Olmo 3 has windows in three
of four layers:

```toml title="olmo3.toml"
[model]
norm_placement = "after"
qk_norm = "all_heads"

[[model.layer_pattern]]
count = 3
sliding_window = 4096

[[model.layer_pattern]]
```

A table can set `sliding_window`, `rope_theta`, `rope_scaling_factor`, `partial_rotary_factor` (0:
no rotary embedding) or `experts = false` (a dense layer in a model with experts). Options that a
table does not set have the value in `[model]`.

## What is not supported

- Ministral 3 with sequences above its original length, for which transformers multiplies queries
  by a factor. titanlite rejects such a `training.seq_len`.
- LongRoPE factors that are chosen for each text by its length, as in transformers. titanlite uses
  the long factors for all sequences of a run if `training.seq_len` is above the original length,
  and otherwise the short factors.
- Dropout. titanlite ignores it in the config.json of StarCoder2 and GPT-2, where it changes only
  training, and rejects it in other families.
- An epsilon other than 1e-6 for the norms of DeepSeek's latents (`model.mla.norm_eps`), whatever
  `rms_norm_eps` in config.json says; and `norm_topk_prob` of DeepSeek-V2, which is rejected, since
  transformers ignores it and DeepSeek's code does not.
- The export of gpt-oss in MXFP4; it is exported in bfloat16 or float32.
- Capped attention scores (Gemma 2), with which attention could not be one fused kernel.
- Image encoders. Gemma 3 from 4B on and Ministral 3 are released with an image encoder, so their
  released folders are rejected, but flavors of these sizes can train from initial weights.

## Every other key, and every other model type

There must be no silent difference: a config.json that titanlite accepts must mean the same in
transformers. A sweep over the {n_types} types of causal language models in transformers {version}
checks this rule ([log](../benchmarks/logs/model_types.log), tests/hf/test_model_types.py). For each
supported type the sweep changes every key of config.json, one at a time, and adds keys of other
types. From each changed file, transformers builds and saves a model with random weights, which
titanlite loads. With {equal} of the files, titanlite and transformers computed the same. titanlite
rejected {rejected} files. With {different} files the two programs computed different numbers. The
last column of the table of families has the numbers of equal and of rejected files of each type.

{n_others} other model types of transformers are rejected with an error message. If a key of config.json
shows what the type has and titanlite lacks, the message names it:

{others}
"""


if __name__ == "__main__":
    if "--sweep" in sys.argv:
        sweep()
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
