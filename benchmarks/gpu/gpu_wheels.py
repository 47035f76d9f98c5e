"""Download the wheels of a list into a folder, for a GPU machine without a network, and print their size.

    python -m benchmarks.gpu.gpu_wheels LIST.txt [LIST.txt ...] FOLDER [--python 3.12]

Each list pins packages, one per line; what they need in turn is not downloaded but listed, too. The wheels are those of
CPython on x86-64 Linux, also where this machine is another. There, `pip install --no-index --no-deps --target SITE
FOLDER/*.whl` unpacks them, and PYTHONPATH=SITE finds them before what the machine has.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 24, 17)] + ["manylinux2014_x86_64"]


def download(lists: list[Path], folder: Path, python: str) -> list[Path]:
    """Download the wheels that the lists name into a folder, in place of other versions of theirs, and return them.

    Raises:
        subprocess.CalledProcessError: if pip does not find one.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS)]
    command += [f"--requirement={file}" for file in lists]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        subprocess.run([*command, "-d", name], check=True)
        wheels = sorted(Path(name).glob("*.whl"))
        packages = {wheel.name.partition("-")[0] for wheel in wheels}
        for old in folder.glob("*.whl"):
            if old.name.partition("-")[0] in packages:
                old.unlink()
        return [wheel.rename(folder / wheel.name) for wheel in wheels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="+", type=Path, metavar="LIST.txt")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="version of Python there (default: 3.12)")
    arguments = parser.parse_args()
    wheels = download(arguments.lists, arguments.folder, arguments.python)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in arguments.folder.glob("*.whl"))
    print(f"{total / 1e6:6.2f} MB  in {arguments.folder}")


if __name__ == "__main__":
    main()
