"""Write docs/reference/rates.md: every rate that a plan takes for a device, and its source.

    python -m docs.build.rates_page

The rates are those of titanlite/metrics/devices.toml, the shares those of titanlite/tools/plan/efficiency.toml.
tests/tools/plan/test_rates.py fails until the page is what this script writes.
"""

from pathlib import Path

from docs.build.page_tables import table_lines
from titanlite.metrics.devices import DEVICES, Device
from titanlite.tools.plan.efficiency import ANY, Share, reached

PAGE = Path(__file__).parents[1] / "reference" / "rates.md"
DATA_SHEET = {
    "bf16": "TFLOP/s in bfloat16",
    "fp8": "in float8",
    "memory_bandwidth": "TB/s of device memory",
    "interconnect_bandwidth": "within a node",
    "network_bandwidth": "between nodes",
}
INTRODUCTION = """# Rates of the plan, and their sources

A plan multiplies a device's data sheet with the share of it that programs reach. No share was
chosen by a published training run. "expected (least to most)" is the share, or seconds; the basis
says what it is for this device: measured on it, measured on another device, or an estimate. Where
it was measured on another device, both ends of the range are 10 % farther off, and the range here
has that. A device that `titanlite calibrate` has measured takes none of these.
`python -m docs.build.rates_page` writes this page.
"""


def rates_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## Data sheets\n"]
    columns = ["device", *DATA_SHEET.values(), "source"]
    rows = [[f"`{name}`", *_data_sheet(device), device.source] for name, device in DEVICES.items()]
    parts += ["\n".join(table_lines(columns, rows)), ""]
    for name, device in DEVICES.items():
        shares = dict(reached(device.architecture if device.kind == "gpu" else "cpu", name))
        rows = [_row(key, share, name) for key, share in shares.items() if isinstance(share, Share)]
        parts += [
            f"## {name}\n",
            "\n".join(table_lines(["rate", "expected (least to most)", "basis", "source"], rows)),
            "",
        ]
    rows = [_row(key, share, "") for key, share in vars(ANY).items()]
    parts += [
        "## Any device\n",
        "\n".join(table_lines(["rate", "expected (least to most)", "basis", "source"], rows)),
        "",
    ]
    return "\n".join(parts)


def _data_sheet(device: Device) -> list[str]:
    return [f"{getattr(device, key) / 1e12:,.4g}" for key in DATA_SHEET]


def _row(key: str, share: Share, name: str) -> list[str]:
    basis = share.basis(name) if name else "an estimate" if "estimate" in share.source else "published"
    return [f"`{key}`", f"{share.expected:.4g} ({share.low:.4g} to {share.high:.4g})", basis, share.source]


if __name__ == "__main__":
    PAGE.write_text(rates_page())
