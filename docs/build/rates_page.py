"""Write docs/reference/rates.md: every rate that a plan takes for a device, and its source.

    python -m docs.build.rates_page

The rates are those of titanlite/metrics/devices.toml, the shares those of titanlite/tools/plan/efficiency.toml.
tests/tools/plan/test_rates.py fails until the page is what this script writes.
"""

from collections.abc import Mapping
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

If a device was not calibrated, a plan multiplies the rates of its data sheet with the share that
programs reach. No share was chosen by a published training run. "expected (least to most)" is a
share, or seconds. The basis says where the number is from: measured on this device, measured on
another device, or an estimate. A range that was measured on another device is 10 % wider at both
ends, as printed here. `titanlite calibrate` replaces all of these. The tables are written by
`python -m docs.build.rates_page`.
"""


def rates_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## Data sheets\n"]
    columns = ["device", *DATA_SHEET.values(), "source"]
    rows = [[f"`{name}`", *_data_sheet(device), device.source] for name, device in DEVICES.items()]
    parts += ["\n".join(table_lines(columns, rows)), ""]
    for name, device in DEVICES.items():
        shares = {key: share for key, share in reached(device, name) if isinstance(share, Share)}
        parts += _section(name, shares, name)
    parts += _section("Any device", vars(ANY))
    return "\n".join(parts)


def _data_sheet(device: Device) -> list[str]:
    return [f"{getattr(device, key) / 1e12:,.4g}" for key in DATA_SHEET]


def _section(title: str, shares: Mapping[str, Share], name: str = "") -> list[str]:
    """Return the table of a device's shares, or of those of any device."""
    rows = []
    for key, share in shares.items():
        basis = share.basis(name) if name else "an estimate" if "estimate" in share.source else "published"
        rows.append([f"`{key}`", f"{share.expected:.4g} ({share.low:.4g} to {share.high:.4g})", basis, share.source])
    return [f"## {title}\n", "\n".join(table_lines(["rate", "expected (least to most)", "basis", "source"], rows)), ""]


if __name__ == "__main__":
    PAGE.write_text(rates_page())
