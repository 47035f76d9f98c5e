"""Plan mixtures of experts as if their all-to-alls carried fewer bytes, to bound what sending less can give.

    python benchmarks/all_to_all_bounds.py            (about five minutes)

Each row plans a config three times: as it is; with half of the bytes in every all-to-all; and with none. Half is more
than 8-bit dispatch can save, since only one of the four transfers of a layer (dispatch and combine, forward and
backward) would be in 8 bits, two of five with full activation checkpointing. Over several nodes half is what a model
saves whose tokens go to 8 experts on at most 4 nodes, as DeepSeek-V3's, if each is sent once per node.
"""

from collections.abc import Callable

from page_tables import table_line, table_lines
from reference_configs import planned

from titanlite.tools.plan.cost_model import CostModel

EP = "--parallelism.expert_parallel_degree="
CONFIGS = (
    ("mixtral_8x7b", "EP 8, within a node"),
    ("qwen3_30b_a3b", "EP 8, within a node"),
    ("qwen3_235b_a22b", "EP 8, within a node"),
    ("qwen3_235b_a22b", "EP 32, four nodes", f"{EP}32"),
    ("deepseek_v3_671b", "EP 8, within a node"),
    ("deepseek_v3_671b", "EP 64, eight nodes", f"{EP}64"),
)
seconds_of_a_collective = CostModel.collective_seconds


def with_share(share: float) -> Callable[..., float]:
    """Return CostModel.collective_seconds with that share of the bytes of each all-to-all."""

    def collective_seconds(model: CostModel, name: str, size: int, ranks: list[int]) -> float:
        if name == "all_to_all":
            size = int(size * share)
        return seconds_of_a_collective(model, name, size, ranks)

    return collective_seconds


def main() -> None:
    head = ["config", "experts", "tokens/s per device, as it is", "half of the bytes", "no bytes"]
    print(*table_lines(head, []), sep="\n", flush=True)
    for name, label, *options in CONFIGS:
        cells = [name, label]
        for share in (1.0, 0.5, 0.0):
            CostModel.collective_seconds = with_share(share)
            cells.append(f"{planned(name, *options).tokens_per_second:,.0f}")
        print(table_line(cells), flush=True)


if __name__ == "__main__":
    main()
