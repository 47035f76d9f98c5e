"""config.json and generation_config.json of an exported folder: what a released model's files say stays, except what
the run changed. transformers and titanlite read the result as the model that it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.test_hf_config import KIMI_K2, READ
from tests.helpers.cases import cases
from tests.helpers.checkpoint import write_checkpoint
from tests.helpers.config import problems
from tests.helpers.hf import FAMILIES, build_hf, empty_model
from tests.hf.test_hf_export import command, from_pretrained
from titanlite.checkpoint.export import export_last_step
from titanlite.config.hf.config_json import model_options
from titanlite.config.hf.deepseek import yarn_magnitude
from titanlite.config.schema import Checkpoint, Model
from titanlite.hf.config_files import config_files
from titanlite.hf.load import load_hf_weights
from titanlite.hf.names import named_weights

KEPT: dict[str, Any] = {
    **{"initializer_range": 0.006, "router_aux_loss_coef": 0.003, "output_router_logits": False, "use_cache": True},
    **{"bos_token_id": 1, "eos_token_id": [2, 7, 9], "pad_token_id": 0, "max_position_embeddings": 131072},
    **{"transformers_version": "4.51.0", "torch_dtype": "float32", "a_key_of_later": {"x": [1]}},
}
GENERATION = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [2, 7], "pad_token_id": 0}
TOKENS = {"torch_dtype": "bfloat16", "bos": 1, "eos": 7}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = GENERATION) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that differ, with the new value."""
    return {key: after.get(key, "absent") for key in {**before, **after} if before.get(key, "absent") != after.get(key)}


@pytest.mark.parametrize("name", READ)
def test_what_the_source_says_stays(name: str, tmp_path: Path):
    """The keys that differ describe the files: their dtype, layers that they lack, and code that is not copied."""
    content = {"num_key_value_heads": 4, **READ[name][0], **KEPT}
    source = write(tmp_path, content)
    options = Model.model_validate(model_options(source))
    config, generation = config_files(options, source, max_seq_len=131072, **TOKENS)
    expected = {"torch_dtype": "bfloat16"}
    if content["model_type"] == "deepseek_v3" and content.get("num_nextn_predict_layers") != 0:
        expected["num_nextn_predict_layers"] = 0
    assert differences(content, config) == expected | ({"auto_map": "absent"} if "auto_map" in content else {})
    assert generation == GENERATION


def test_kimi_k2_is_a_deepseek_v3_by_another_name(tmp_path: Path):
    """transformers has no model type kimi_k2: the exported folder has the one of the same keys and tensors."""
    content = {**KIMI_K2, **KEPT}
    source = write(tmp_path, content)
    options = Model.model_validate(model_options(source))
    config, _ = config_files(options, source, max_seq_len=131072, **TOKENS)
    assert config["model_type"] == "deepseek_v3"
    assert config["n_routed_experts"] == 384
    assert "auto_map" not in config
    again = tmp_path / "again"
    again.mkdir()
    assert Model.model_validate(model_options(write(again, config))) == options


CHANGES: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_theta": 7e5},
    "norm and vocabulary": {"vocab_size": 96},
    "yarn": {"rope_scaling_type": "yarn", "rope_scaling_factor": 2.0, "rope_original_seq_len": 640},
    "window": {"sliding_window": 5},
    "no window": {"sliding_window": 0},
}


WITH_WINDOWS = ("mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
CASES = [(name, change) for name in READ for change in CHANGES]
CASES = [case for case in CASES if case[1] != "window" or READ[case[0]][0]["model_type"] in WITH_WINDOWS]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_what_the_run_changed_is_written(name: str, change: str, tmp_path: Path):
    """The new config.json, read again, is that of the model. It keeps the keys that have nothing to do with it."""
    content = {"num_key_value_heads": 4, **READ[name][0], **KEPT}
    options = Model.model_validate(model_options(write(tmp_path, content))).model_copy(update=CHANGES[change])
    if change == "yarn" and options.rope_attention_factor == -1 and options.mla.mscale_all_dim:
        options = options.model_copy(update={"rope_attention_factor": yarn_magnitude(1, 2.0)})  # as -1 means
    config, _ = config_files(options, tmp_path, max_seq_len=262144, **TOKENS)
    assert config["max_position_embeddings"] == 262144
    out = tmp_path / "out"
    out.mkdir()
    actual = Model.model_validate(model_options(write(out, config)))
    keys = options.identity().keys() - {"rope_original_seq_len", "rope_scaling_type"}
    if options.rope_scaling_factor == 1:  # then nothing reads the others
        keys = {key for key in keys if not key.startswith("rope_") or key == "rope_theta"}
    else:
        assert actual.rope_original_seq_len == options.rope_original_seq_len or options.rope_scaling_type == "linear"
    assert {key: actual.identity()[key] for key in keys} == {key: options.identity()[key] for key in keys}
    free = KEPT.keys() - {"max_position_embeddings", "torch_dtype"}
    assert {key: config[key] for key in free} == {key: KEPT[key] for key in free}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, 9), ({}, {})),
        ((None, None), ({}, {})),
        ((1, 5), ({"eos_token_id": 5}, {"eos_token_id": 5})),
        ((3, 7), ({"bos_token_id": 3}, {"bos_token_id": 3})),
    ],
    ids=["one of the source", "none", "another EOS", "another BOS"],
)
def test_token_ids_of_another_tokenizer_replace_those_of_the_source(ids: Any, expected: Any, tmp_path: Path):
    content = {**READ["qwen3_moe"][0], **KEPT}
    options = Model.model_validate(model_options(write(tmp_path, content)))
    arguments = {"torch_dtype": "float32", "bos": ids[0], "eos": ids[1], "max_seq_len": 131072}
    config, generation = config_files(options, tmp_path, **arguments)
    assert (differences(content, config), differences(GENERATION, generation)) == expected
    (tmp_path / "generation_config.json").unlink()
    config, generation = config_files(options, tmp_path, **arguments)
    assert generation == {"_from_model_config": True, **{key: config[key] for key in ("bos_token_id", "eos_token_id")}}


@pytest.mark.parametrize("value", ["2", [2, "7"], {"a": 1}, 2.0, [True]], ids=str)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_wrong_token_ids_are_one_line(name: str, value: Any, tmp_path: Path):
    contents = {"config.json": {**READ["qwen3"][0], **KEPT}, "generation_config.json": dict(GENERATION)}
    contents[name]["eos_token_id"] = value
    write(tmp_path, *contents.values())
    options = Model.model_validate(model_options(tmp_path))
    (line,) = problems(lambda: config_files(options, tmp_path, max_seq_len=9, **TOKENS))
    assert line.startswith(f"{tmp_path / name}: eos_token_id = ")
    assert line.endswith(": expected token ids")


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(request: Any, tmp_path: Path, assets: Any) -> Path:
    """A run that started from the folder `hf`, a released model with a tokenizer, and whose weights are still those."""
    settings = {"vocab_size": 400, "initializer_range": 0.006, "max_position_embeddings": 4096, "eos_token_id": [1, 7]}
    hf = build_hf(getattr(request, "param", "llama"), **settings, bos_token_id=0)
    hf.generation_config.temperature, hf.generation_config.do_sample = 0.6, True
    hf.save_pretrained(tmp_path / "hf")
    assets.file.rename(tmp_path / "hf" / "tokenizer.json")
    options = Model(flavor="from_hf", hf_assets_path=str(tmp_path / "hf"))
    model = empty_model(options)
    load_hf_weights(tmp_path / "hf", model, options)
    weights = {f"model.{name}": weight.detach() for name, weight in named_weights(model).items()}
    identity = {"seed": 1, "data": "x", **options.identity()}
    write_checkpoint(tmp_path / "run" / "checkpoint" / "step-2", weights, step=2, identity=identity)
    write_run(tmp_path)
    return tmp_path


def write_run(folder: Path, start: str = "hf", flavor: str = "from_hf") -> None:
    """Write the config.toml of the run, whose weights are from another folder than its tokenizer if `start` says so."""
    lines = [
        "[training]",
        "seq_len = 24",
        "steps = 2",
        "[model]",
        f'flavor = "{flavor}"',
        f'hf_assets_path = "{folder}/hf"',
    ]
    place = start if start in ("", "none") else f"{folder}/{start}"
    (folder / "run" / "config.toml").write_text("\n".join([*lines, "[checkpoint]", f'initial_load_path = "{place}"']))


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def export(folder: Path, *arguments: Any) -> int:
    return command(folder / "run" / "checkpoint", folder / "out", *arguments)


@cases("folder", FAMILIES, always=["llama", "deepseek_v3"], indirect=True)
def test_an_exported_family_is_its_source(folder: Path, capsys):
    assert export(folder) == 0
    before, after = (read(folder / name) for name in ("hf", "out"))
    changed = {key: 0 for key in ("num_nextn_predict_layers",) if key in before and before[key] != 0}
    assert differences(before, after) == changed
    assert read(folder / "out", "generation_config.json") == read(folder / "hf", "generation_config.json")
    line = f"config.json: that of {folder}/hf{', except for ' if changed else ''}{', '.join(changed)}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    hf, theirs = from_pretrained(folder / "out"), from_pretrained(folder / "hf")
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in hf.state_dict().items())
    same_place = {**changed, "_name_or_path": ""}
    assert {**hf.config.to_dict(), **same_place} == {**theirs.config.to_dict(), **same_place}
    assert hf.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_the_last_step_in_hf_keeps_it_too(folder: Path):
    export_last_step(folder / "run", Checkpoint(export_dtype="bfloat16"))
    after = read(folder / "run" / "checkpoint" / "step-2-hf")
    assert differences(read(folder / "hf"), after) == {"dtype": "bfloat16"}


@cases(
    ("start", "flavor", "arguments", "positions"),
    [
        ("hf", "debug", [], 4096),
        ("other/step-7", "from_hf", [], 4096),
        ("other/step-7", "debug", [], 24),
        ("none", "from_hf", [], 24),
        ("", "debug", [], 24),
        ("hf", "from_hf", ["--source", "none"], 24),
        ("none", "from_hf", ["--source", "{0}/hf"], 4096),
        ("hf", "from_hf", ["--max-seq-len", 99], 99),
        ("none", "from_hf", ["--max-seq-len", 99], 99),
    ],
    always=[(start, "from_hf", ["--max-seq-len", 99], 99) for start in ("hf", "none")],
)
def test_the_source_is_what_the_run_started_from(
    start: str, flavor: str, arguments: list[Any], positions: int, folder: Path
):
    write_run(folder, start, flavor)
    assert export(folder, *(str(argument).format(folder) for argument in arguments)) == 0
    assert read(folder / "out")["max_position_embeddings"] == positions


def test_a_run_on_longer_sequences_states_them(folder: Path):
    file = folder / "run" / "config.toml"
    file.write_text(file.read_text().replace("seq_len = 24", "seq_len = 8192"))
    assert export(folder) == 0
    assert differences(read(folder / "hf"), read(folder / "out")) == {"max_position_embeddings": 8192}


@pytest.mark.parametrize("arguments", [[], ["--source", "{0}/gone"]], ids=["of the run", "named"])
def test_a_source_that_is_gone_is_one_line(arguments: list[str], folder: Path, capsys):
    write_run(folder, "gone")
    assert export(folder, *(argument.format(folder) for argument in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    problem = f"error: {folder}/gone: has no config.json, and the exported one has its keys"
    assert line == f"{problem}; name that folder with --source, or --source none for a new config.json"
    assert not (folder / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_hostile_source_is_one_line(name: str, folder: Path, capsys):
    (folder / "hf" / name).write_text("[" * 100_000)
    assert export(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}/hf/{name}: not valid JSON: ")
    assert not (folder / "out").exists()
