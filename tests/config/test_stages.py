"""Stages are as balanced as a split can make them, by what the config names, and on the ranks that torch expects."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from titanlite import build, config
from titanlite.config import Config
from titanlite.config.model_sizes import SIZES
from titanlite.config.stage_split import ONE_STAGE, Schedule, module_names, rank_of_stage, split_into_stages
from titanlite.metrics.flops import flops_per_token

Stages = list[list[str]]


def sums(costs: Sequence[int], stages: Stages) -> list[int]:
    """Cost of each stage."""
    left = iter(costs)
    return [sum(itertools.islice(left, len(stage))) for stage in stages]


def splits(names: list[str], n_stages: int) -> Iterator[Stages]:
    """Every split that leaves each stage a layer."""
    for ends in itertools.combinations(range(1, len(names)), n_stages - 1):
        stages = [names[start:end] for start, end in itertools.pairwise([0, *ends, len(names)])]
        if all(any(name.startswith("layers.") for name in stage) for stage in stages):
            yield stages


def random_cases(number: int) -> Iterator[tuple[list[int], int]]:
    """Costs of a model's modules, some of them nothing, and how many stages it has."""
    generator = random.Random(0)
    for _ in range(number):
        n_layers = generator.randint(1, 8)
        yield [generator.randint(0, 9) for _ in module_names(n_layers)], generator.randint(1, n_layers)


# ---------------------------------------------------------------------------------------------------------------------
# Splits


def test_module_names():
    assert module_names(2) == ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]


def test_stages_are_the_modules_in_order_each_with_a_layer():
    for costs, n_stages in random_cases(2000):
        names = module_names(len(costs) - 3)
        stages = split_into_stages(names, costs, n_stages)
        assert len(stages) == n_stages
        assert list(itertools.chain(*stages)) == names
        assert all(any(name.startswith("layers.") for name in stage) for stage in stages)


def test_no_split_has_a_smaller_largest_stage():
    for costs, n_stages in random_cases(2000):
        names = module_names(len(costs) - 3)
        least = min(max(sums(costs, stages)) for stages in splits(names, n_stages))
        assert max(sums(costs, split_into_stages(names, costs, n_stages))) == least, (costs, n_stages)


def evenness(costs: Sequence[int], stages: Stages) -> tuple[int, int]:
    return max(sums(costs, stages)), sum(cost**2 for cost in sums(costs, stages))


def test_of_the_splits_with_the_smallest_largest_stage_none_is_more_even():
    # 9 | 9 | 1 has the smallest largest of the first three stages, but the last is 17 whatever they are: 5 | 4 | 10.
    hard = [([3, 2, 4, 9, 1, 4, 6, 7], 4)]
    for costs, n_stages in [*hard, *random_cases(2000)]:
        names = module_names(len(costs) - 3)
        best = min(evenness(costs, stages) for stages in splits(names, n_stages))
        assert evenness(costs, split_into_stages(names, costs, n_stages)) == best, (costs, n_stages)


def test_as_many_stages_as_layers_leave_no_choice_but_the_ends():
    assert split_into_stages(module_names(3), [100, 1, 1, 1, 0, 100], 3) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2", "norm", "output"],
    ]
    assert split_into_stages(module_names(1), [1, 1, 0, 1], 1) == [module_names(1)]


@pytest.mark.parametrize(("n_layers", "n_stages"), [(0, 1), (1, 2), (3, 4)])
def test_fewer_layers_than_stages(n_layers: int, n_stages: int):
    names = module_names(n_layers)
    with pytest.raises(ValueError, match=f"^{n_stages} stages need at least as many layers, and there are {n_layers}$"):
        split_into_stages(names, [1] * len(names), n_stages)


# ---------------------------------------------------------------------------------------------------------------------
# What the config balances

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A config of so many layers and pipeline ranks, and other options of [parallelism]."""
    file = tmp_path / "run.toml"
    file.touch()

    def load(n_layers: int, degree: int, *args: str, **parallelism: Any) -> Config:
        settings = {"pipeline_parallel_degree": degree, **parallelism}
        options = [f"--parallelism.{key}={value}" for key, value in settings.items()]
        return config.load([str(file), f"--model.n_layers={n_layers}", *options, *args]).config

    return load


def layers(stages: Stages) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


# fmt: off
BALANCED = {  # layers, pipeline ranks, layers that embedding and head count as, layers of each stage
    "the ends count as one":     (6, 2, 1, 1, [3, 3]),
    "a short first stage":       (6, 2, 2, 0, [2, 4]),
    "a short last stage":        (6, 2, 0, 4, [5, 1]),
    "the ends count as none":    (6, 3, 0, 0, [2, 2, 2]),
    "shorter at the ends":       (6, 4, 1, 1, [1, 2, 2, 1]),
    "an end above all others":   (7, 3, 7, 0, [1, 3, 3]),
}
# fmt: on


@pytest.mark.parametrize(("n_layers", "degree", "first", "last", "expected"), BALANCED.values(), ids=BALANCED)
def test_balanced_by_layers(load: Load, n_layers: int, degree: int, first: int, last: int, expected: list[int]):
    ends = {"pipeline_parallel_first_stage_less_layers": first, "pipeline_parallel_last_stage_less_layers": last}
    stages = config.schema.stage_modules(load(n_layers, degree, **ends))
    assert list(itertools.chain(*stages)) == module_names(n_layers)
    assert layers(stages) == expected


def test_stages_of_all_ranks(load: Load):
    options = {"pipeline_parallel_schedule": "LoopedBFS", "pipeline_parallel_stages_per_rank": 3}
    ends = {"pipeline_parallel_first_stage_less_layers": 1, "pipeline_parallel_last_stage_less_layers": 1}
    assert layers(config.schema.stage_modules(load(10, 2, **options, **ends))) == [1, 2, 2, 2, 2, 1]


# fmt: off
BY_DEFAULT = {  # flavor, pipeline ranks, schedule, stages per rank, layers of each stage
    "8B, whose head is two layers":       ("llama3_8b", 4, "1F1B", 1, [8, 9, 9, 6]),
    "8B, of 8 stages":                    ("llama3_8b", 4, "Interleaved1F1B", 2, [4, 4, 4, 4, 4, 5, 5, 2]),
    "8B, first and last stage of a rank": ("llama3_8b", 4, "ZBVZeroBubble", 2, [4, 4, 4, 4, 4, 5, 5, 2]),
    "13B, whose head is half a layer":    ("llama2_13b", 4, "1F1B", 1, [10, 10, 10, 10]),
    "20B, whose head is four layers":     ("gpt_oss_20b", 2, "1F1B", 1, [14, 10]),
    "a stage has a layer at least":       ("gpt_oss_20b", 8, "Interleaved1F1B", 2, [*[1] * 7, *[2] * 8, 1]),
}
# fmt: on


@pytest.mark.parametrize(("flavor", "degree", "schedule", "per_rank", "expected"), BY_DEFAULT.values(), ids=BY_DEFAULT)
def test_the_output_head_counts_by_its_operations(
    load: Load, flavor: str, degree: int, schedule: str, per_rank: int, expected: list[int]
):
    options = {"pipeline_parallel_schedule": schedule, "pipeline_parallel_stages_per_rank": per_rank}
    args = f"--model.flavor={flavor}", "--training.seq_len=8192"
    stages = config.schema.stage_modules(load(SIZES[flavor]["n_layers"], degree, *args, **options))
    assert layers(stages) == expected
    assert stages[-1][-2:] == ["norm", "output"]


@pytest.mark.parametrize("flavor", ["llama3_8b", "gpt_oss_20b", "qwen3_30b_a3b", "moonlight_16b_a3b", "gemma3_1b"])
def test_the_heads_layers_agree_with_the_operations_of_mfu(flavor: str):
    """MFU counts attention without a mask: twice the operations with one, for sequences shorter than a window."""
    model = config.schema.Model.model_validate({"flavor": flavor})
    seq_len = 8
    sizes = {name: parameter.numel() for name, parameter in build.meta_model(Config(model=model)).named_parameters()}
    matrix = 2 * model.dim * model.vocab_size
    attention = 2 * model.n_heads * (model.head_dim + model.v_head_dim) * seq_len * model.n_layers
    layers = flops_per_token(sizes, model, seq_len) / 3 - matrix - attention / 2
    expected = matrix / layers * model.n_layers
    assert config.schema.layers_of_head(model, seq_len) == pytest.approx(expected, rel=2e-3)  # biases of idle experts


def test_longer_sequences_and_windows_change_the_heads_layers():
    model = config.schema.Model.model_validate({"flavor": "llama3_8b"})
    short, long = (config.schema.layers_of_head(model, seq_len) for seq_len in (8192, 131072))
    assert short == pytest.approx(2.09, abs=0.01)
    assert long == pytest.approx(1050673152 / (436207616 + 2 * 4096 * 131072), abs=1e-4)
    windowed = model.model_copy(update={"sliding_window": 4096})
    assert config.schema.layers_of_head(windowed, 131072) == pytest.approx(
        1050673152 / (436207616 + 4 * 4096 * (4096 - 4096**2 / (2 * 131072))), abs=1e-4
    )


def module_sizes(settings: Config) -> Counter[str]:
    """Parameters of each module that stages are made of, counted in the model itself."""
    sizes: Counter[str] = Counter()
    for name, parameter in build.meta_model(settings).named_parameters():
        first, second, *_ = name.split(".")
        sizes[f"{first}.{second}" if first == "layers" else first] += parameter.numel()
    return sizes


@pytest.mark.parametrize("flavor", [name for name, size in SIZES.items() if not size["tie_embeddings"]])
@pytest.mark.parametrize("degree", [2, 3])
def test_balanced_by_parameters(load: Load, monkeypatch: pytest.MonkeyPatch, flavor: str, degree: int):
    settings = load(8, degree, f"--model.flavor={flavor}", pipeline_parallel_balance="parameters")
    costed: dict[str, int] = {}

    def record(names: list[str], costs: list[int], n_stages: int) -> Stages:
        costed.update(zip(names, costs, strict=True))
        return split_into_stages(names, costs, n_stages)

    monkeypatch.setattr(config.schema, "split_into_stages", record)
    stages, sizes = config.schema.stage_modules(settings), module_sizes(settings)
    assert costed == sizes
    names = module_names(8)
    costs = [sizes[name] for name in names]
    assert list(itertools.chain(*stages)) == names
    assert evenness(costs, stages) == min(evenness(costs, split) for split in splits(names, degree))


def test_parameters_and_layers_balance_differently(load: Load):
    """A vocabulary that is as large as some layers, at both ends."""
    args = ("--model.vocab_size=8192",)
    assert layers(config.schema.stage_modules(load(10, 4, *args))) == [3, 3, 3, 1]
    assert layers(config.schema.stage_modules(load(10, 4, *args, pipeline_parallel_balance="parameters"))) == [
        1,
        4,
        4,
        1,
    ]


def test_modules_by_name_are_the_stages(load: Load):
    stages = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
    assert config.schema.stage_modules(load(3, 2, module_fqns_per_model_part=stages)) == stages


# ---------------------------------------------------------------------------------------------------------------------
# Ranks

STYLES = {  # in which torch's schedules assign stages to ranks
    **dict.fromkeys(("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), "loop"),
    **dict.fromkeys(("ZBVZeroBubble", "DualPipeV"), "v"),
}


def test_every_schedule_has_a_style():
    assert set(STYLES) == set(get_args(Schedule))


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", STYLES)
def test_ranks_are_those_of_torch(schedule: Schedule, degree: int):
    many = (2,) if STYLES[schedule] == "v" else (1,) if schedule in ONE_STAGE else (2, 3, 4)
    for n_stages in (degree * per_rank for per_rank in many):
        mapping = generate_stage_to_rank_mapping(degree, n_stages, style=STYLES[schedule])
        assert dict(enumerate(rank_of_stage(schedule, degree, n_stages))) == mapping


def test_ranks_by_hand():
    assert rank_of_stage("1F1B", 4, 4) == [0, 1, 2, 3]
    assert rank_of_stage("LoopedBFS", 2, 6) == [0, 1, 0, 1, 0, 1]
    assert rank_of_stage("DualPipeV", 3, 6) == [0, 1, 2, 2, 1, 0]
