"""Build the null CUDA: libraries that stand for CUDA's runtime and driver, cuBLAS, cuDNN and NCCL without a device.

torch's CUDA build runs on them as it is: its allocator, streams, process groups, inductor, Triton and ptxas. Memory has
addresses and limits, kernels compute nothing, and everything that is asked of the device is logged. So a machine
without a GPU can count what a step launches, copies, waits for and allocates. Values and times mean nothing.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
LIBRARIES = {  # source: the library that it stands for, and the names that torch asks of it
    "runtime": ("libcudart.so", r"cuda[A-Z]\w*|__cuda\w+"),
    "driver": ("libcuda.so", r"cu(?!da|blas|dnn|File)[A-Z]\w*"),
    "nccl": ("libnccl.so", r"nccl\w+"),
    "cublas": ("libcublas.so", r"cublas(?!Lt)\w+"),
    "cublaslt": ("libcublasLt.so", r"cublasLt\w+"),
    "cudnn": ("libcudnn.so", r"cudnn[A-Z]\w+"),
    "nvrtc": ("libnvrtc.so", r"nvrtc\w+"),
    "nvml": ("libnvidia-ml.so", r"nvml\w+"),
}
NOT_SUPPORTED = 801  # cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED
PACKAGES = Path(sysconfig.get_paths()["purelib"])


def why_not() -> str:
    """Return why the null CUDA cannot be built here; "" if it can be."""
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    if not list(PACKAGES.glob("nvidia/*/include/cuda_runtime_api.h")):
        return "no headers of CUDA among the installed packages"
    missing = [program for program in ("gcc", "nm", "readelf") if not shutil.which(program)]
    return f"needs {', '.join(missing)}" if missing else ""


def environment(folder: Path) -> dict[str, str]:
    """Build the libraries into a folder, once. Return the environment variables of a process that runs on them."""
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        asked, libraries = _asked_for()
        for source, (library, names) in LIBRARIES.items():
            functions = sorted(name for name in asked if re.fullmatch(names, name))
            _build(folder, source, libraries.get(library, f"{library}.1"), functions)
        (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what Triton links its launchers with
        done.touch()
    built = sorted(str(path) for path in folder.glob("*.so.*"))
    return {
        "LD_PRELOAD": ":".join(built),  # before torch's own, which it finds by its RPATH
        "LD_LIBRARY_PATH": ":".join(map(str, [folder, *PACKAGES.glob("nvidia/*/lib")])),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _asked_for() -> tuple[set[str], dict[str, str]]:
    """Return the names of functions that torch's libraries take from others, and the libraries' file names, which
    have versions, by the names without."""
    names, files = set[str](), dict[str, str]()
    for path in sorted((PACKAGES / "torch").rglob("*.so")):
        symbols = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True).stdout
        names |= {line.split()[-1].partition("@")[0] for line in symbols.splitlines() if line.strip()}
        if path.name == "libc10_cuda.so":  # it looks functions of the driver and of NVML up by their names
            names |= {name.decode() for name in re.findall(rb"\0((?:cu[A-Z]|nvml)\w+)(?=\0)", path.read_bytes())}
        header = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        for file in re.findall(r"\(NEEDED\).*\[(\S+)\]", header):
            files[re.sub(r"\.so\.\d+$", ".so", file)] = file
    return names, files


def _build(folder: Path, source: str, file: str, names: list[str]) -> None:
    """Compile a library. Functions that torch asks for and the source lacks succeed without doing anything, but of
    the runtime and the driver they are not supported."""
    text = (SOURCES / f"{source}.c").read_text()
    missing = [name for name in names if not re.search(rf"\b{name}\(", text)]
    result = NOT_SUPPORTED if source in ("runtime", "driver") else 0
    others = folder / f"{source}.c"
    others.write_text("".join(f"int {name}(void) {{ return {result}; }}\n" for name in missing))
    versions = folder / f"{source}.map"
    versions.write_text(f"{file.replace('-', '_')} {{ global: *; }};\n")
    # NVIDIA's packages lack the headers crt/, which Triton's package has.
    folders = [SOURCES, *PACKAGES.glob("nvidia/*/include"), PACKAGES / "triton" / "backends" / "nvidia" / "include"]
    # Those of half precision would need headers of C++, which no package has.
    include = [*(f"-I{path}" for path in folders), "-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__"]
    how = ["-w", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{file},--version-script={versions}", *include]
    subprocess.run(["gcc", *how, SOURCES / f"{source}.c", others, "-o", folder / file, "-ldl", "-lpthread"], check=True)


def variables(folder: Path) -> dict[str, str]:
    """Return the environment of this process with what the null CUDA needs."""
    return {**os.environ, **environment(folder)}
