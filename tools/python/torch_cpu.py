"""Installs torch from its package into a folder of its own, for a machine without a GPU; run by `cargo x python --torch`.

    python torch_cpu.py FOLDER [VERSION]

The package on PyPI is the one for CUDA, whose libraries would be another 3 GB. Nothing calls them without a device, but
the loader asks for them, so stand-ins take their place: an empty library for each that is missing, and one that is
preloaded and defines the functions and variables that torch's libraries take from them. Needs a C compiler, and `nm`
and `readelf` of binutils. `FOLDER/run PROGRAM...` runs a program with the libraries in place, and
`FOLDER/run python ...` torch's interpreter.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

#: Requirements of torch without those for a device.
PURE = ["filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "numpy"]
#: Libraries for which there is a small package, by distribution.
SMALL = ["nvidia-cuda-runtime"]
VERSION = "2.15.0"
#: Result of each function that a stand-in defines: CUDA's `cudaErrorNoDevice`.
NO_DEVICE = 100
#: Libraries whose symbols belong to a device; what another one lacks is an error to be seen.
DEVICE = re.compile(r"^_?(cu|nccl|nvshmem|nvrtc|nvml|nvtx|CUPTI|cupti|__cuda)")


def output(*words):
    """Runs a program and returns its output."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def needed(library):
    """Names of the libraries that a library asks for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", str(library))))


def symbols(library, which):
    """Dynamic symbols of a library, `--undefined-only` or `--defined-only`, without their versions."""
    lines = output("nm", "-D", which, str(library)).splitlines()
    return {line.split()[-1].partition("@")[0]: line.split()[-2] for line in lines}


def install(python, version):
    """Installs torch and its requirements that matter on a CPU."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # Torch was built for numpy 2 from 2.3 on.
    is_old = tuple(map(int, version.split(".")[:2])) < (2, 3)
    pure = [f"{name}<2" if name == "numpy" and is_old else name for name in PURE]
    subprocess.run([*command, f"torch=={version}", *pure, *SMALL], check=True)


def stand_in(folder, packages):
    """Compiles the stand-ins; returns the preloaded one."""
    libraries = [path for path in (packages / "torch" / "lib").glob("*.so*") if path.is_file()]
    asked = set().union(*map(needed, libraries))
    # Libraries of another CUDA than this torch's do not count.
    real = [path for path in (packages / "nvidia").rglob("*.so*") if path.name in asked]
    asked -= {path.name for path in libraries + real}
    resolved = output("ldconfig", "-p") + " libc.so.6"
    missing = sorted(name for name in asked if name not in resolved)
    defined, undefined = set(), {}
    for path in libraries + real:
        defined |= set(symbols(path, "--defined-only"))
    for path in libraries:
        undefined.update(symbols(path, "--undefined-only"))
    lacking = sorted(name for name in set(undefined) - defined if DEVICE.match(name))
    source = folder / "stand_in.c"
    lines = [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in lacking if not name.startswith("nvshmem_sel")]
    lines += [f"int {name} = 0;" for name in lacking if name.startswith("nvshmem_sel")]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    directory = folder / "lib"
    directory.mkdir(exist_ok=True)
    preloaded = directory / "libstand_in.so"
    quiet = ["-shared", "-fPIC", "-fno-builtin", "-w"]
    subprocess.run(["cc", *quiet, "-o", str(preloaded), str(source)], check=True)
    empty = folder / "empty.c"
    empty.write_text("", encoding="utf-8")
    for name in missing:
        subprocess.run(["cc", *quiet, f"-Wl,-soname,{name}", "-o", str(directory / name), str(empty)], check=True)
    print(f"torch: {len(lacking)} symbols and {len(missing)} libraries of devices have stand-ins")
    return preloaded


def begin(folder):
    """Creates a folder, in place of one that was begun like this and not completed. Exits if it has other files."""
    begun = folder / "begun"
    if begun.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} has other files: name a new folder")
    begun.write_text("", encoding="utf-8")


def prepare(name, description, newest):
    """Parses the command line of a program that installs a package into a folder, and makes the folder's environment.
    Returns folder, version, and the file that says that all is done; exits where it is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="a new or empty one")
    parser.add_argument("version", nargs="?", default=newest)
    arguments = parser.parse_args()
    folder, version = arguments.folder.resolve(), arguments.version
    done = folder / f"{name}-{version}.done"
    if done.exists():
        sys.exit(0)
    begin(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    return folder, version, done


def main():
    """Command line entry point."""
    folder, version, done = prepare("torch", __doc__, VERSION)
    python = folder / "venv" / "bin" / "python"
    install(str(python), version)
    packages = pathlib.Path(output(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    preloaded = stand_in(folder, packages)
    runner = folder / "run"
    found = {str(path.parent) for path in (packages / "nvidia").rglob("*.so*")}
    paths = ":".join([str(folder / "lib"), *sorted(found)])
    runner.write_text(
        "#!/bin/sh\n"
        f'export LD_LIBRARY_PATH="{paths}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        f'export LD_PRELOAD="{preloaded}${{LD_PRELOAD:+:$LD_PRELOAD}}"\n'
        f'export PATH="{python.parent}:$PATH"\n'
        'exec "$@"\n',
        encoding="utf-8",
    )
    runner.chmod(0o755)
    seen = output(str(runner), "python", "-c", "import torch.distributed as d; print(d.is_gloo_available())")
    if seen.strip() != "True":
        sys.exit(f"torch {version} was installed in {folder}, and has no torch.distributed with gloo: {seen}")
    done.write_text("", encoding="utf-8")
    print(f"torch: {version} in {folder}: {runner} python")


if __name__ == "__main__":
    main()
