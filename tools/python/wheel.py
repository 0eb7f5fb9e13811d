"""Packs the two wheels from the cargo build; run by `cargo x wheel`.

    python wheel.py --module FILE [--binary FILE] --out DIRECTORY     writes the wheels
    python wheel.py --module FILE --stage DIRECTORY                   lays the packages out for PYTHONPATH

`kvplane` has the native module (stable ABI, CPython 3.9 and later) and the program `kvplane`; `kvplane-mooncake` has
the package `mooncake`, Mooncake's console scripts, and metadata under the name `mooncake-transfer-engine`, by which
callers ask for a version. Only the standard library is needed.
"""

import argparse
import base64
import hashlib
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = HERE / "package"
#: The version of Mooncake whose interface is implemented.
MOONCAKE = "0.3.14"
LICENSE = "MIT OR Apache-2.0"
SCRIPTS = {
    "mooncake_master": "mooncake.cli:master",
    "mooncake_client": "mooncake.cli:client",
    "mooncake_http_metadata_server": "mooncake.http_metadata_server:main",
    "mc_store_rest_server": "mooncake.mooncake_store_service:sync_main",
    "transfer_engine_bench": "mooncake.cli:transfer_engine_bench",
    "transfer_engine_topology_dump": "mooncake.cli:topology_dump",
}


def version():
    """Reads the workspace's version."""
    text = (HERE.parent.parent / "Cargo.toml").read_text(encoding="utf-8")
    return re.search(r'\[workspace\.package\]\s+version = "([^"]+)"', text).group(1)


#: Processors by the number in the header of an ELF file, with the prefix of their tools.
PROCESSORS = {62: ("x86_64", "x86_64-linux-gnu-"), 183: ("aarch64", "aarch64-linux-gnu-")}


def processor(program):
    """The processor of an ELF file, and the prefix of its tools."""
    number = int.from_bytes(program[18:20], "little")
    if program[:4] != b"\x7fELF" or number not in PROCESSORS:
        raise SystemExit(f"wheel.py: not a program for {' or '.join(name for name, _ in PROCESSORS.values())}")
    return PROCESSORS[number]


def platform_tag(module):
    """The oldest glibc that the module loads with, as a wheel platform tag."""
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(2\.\d+)", module)}
    newest = max(versions | {(2, 17)})
    return f"manylinux_{newest[0]}_{newest[1]}_{processor(module)[0]}"


def sources(package):
    """Files of a package, by path in the wheel."""
    root = PACKAGES / package
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".pyi", ".typed"):
            files[f"{package}/{path.relative_to(root).as_posix()}"] = (path.read_bytes(), False)
    if (root / "py.typed").exists():
        files[f"{package}/py.typed"] = (b"", False)
    return files


def stripped(path):
    """A program without debug information, if a strip tool for its processor is available."""
    name, prefix = processor(path.read_bytes())
    tool = shutil.which(f"{prefix}strip") or (shutil.which("strip") if platform.machine() == name else None)
    if tool is None:
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / path.name
        subprocess.run([tool, "--strip-debug", "-o", str(copy), str(path)], check=True)
        return copy.read_bytes()


def metadata(name, number, summary, requires=()):
    """Builds the METADATA of a distribution."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", f"Summary: {summary}"]
    lines += [f"License: {LICENSE}", "Requires-Python: >=3.9"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    return ("\n".join(lines) + "\n").encode()


def pack(out, name, number, tag, files, meta, entry_points=None):
    """Writes one wheel: the files and the installer metadata."""
    label = name.replace("-", "_")
    info = f"{label}-{number}.dist-info"
    pure = str(tag.startswith("py3-none-any")).lower()
    files = dict(files)
    files[f"{info}/METADATA"] = (meta, False)
    wheel = f"Wheel-Version: 1.0\nGenerator: kvplane\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = (wheel.encode(), False)
    if entry_points:
        lines = ["[console_scripts]"] + [f"{script} = {place}" for script, place in entry_points.items()]
        files[f"{info}/entry_points.txt"] = (("\n".join(lines) + "\n").encode(), False)
    record = []
    path = out / f"{label}-{number}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for place, (content, program) in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{place},sha256={digest},{len(content)}")
            write(archive, place, content, program)
        record.append(f"{info}/RECORD,,")
        write(archive, f"{info}/RECORD", ("\n".join(record) + "\n").encode(), False)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def write(archive, place, content, program):
    """Adds one file to a wheel, reproducibly."""
    entry = zipfile.ZipInfo(place, (2020, 1, 1, 0, 0, 0))
    entry.external_attr = (0o100755 if program else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def wheels(module, binary, out):
    """Packs both wheels."""
    number = version()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("kvplane*.whl"):
        old.unlink()
    native = stripped(module)
    files = sources("kvplane")
    files["kvplane/_native.abi3.so"] = (native, True)
    if binary is not None:
        files[f"kvplane-{number}.data/scripts/kvplane"] = (stripped(binary), True)
    about = "The KV-cache dataplane for LLM serving: store and transfer engine for Python"
    pack(out, "kvplane", number, f"cp39-abi3-{platform_tag(native)}", files, metadata("kvplane", number, about))
    alias = f"kvplane_mooncake-{number}.data/purelib/mooncake_transfer_engine-{MOONCAKE}.dist-info"
    about = "The interface of mooncake-transfer-engine, by kvplane-mooncake"
    files = sources("mooncake")
    files[f"{alias}/METADATA"] = (metadata("mooncake-transfer-engine", MOONCAKE, about), False)
    files[f"{alias}/INSTALLER"] = (b"kvplane-mooncake\n", False)
    about = "The package mooncake above kvplane: its users run unmodified"
    meta = metadata("kvplane-mooncake", number, about, [f"kvplane=={number}"])
    pack(out, "kvplane-mooncake", number, "py3-none-any", files, meta, SCRIPTS)


def stage(module, directory):
    """Lays out the packages with the module, for a PYTHONPATH."""
    if directory.exists():
        shutil.rmtree(directory)
    for package in ("kvplane", "mooncake"):
        for place, (content, _) in sources(package).items():
            path = directory / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    shutil.copyfile(module, directory / "kvplane" / "_native.abi3.so")
    info = directory / f"mooncake_transfer_engine-{MOONCAKE}.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(metadata("mooncake-transfer-engine", MOONCAKE, "staged"))


def main():
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", type=pathlib.Path, required=True)
    parser.add_argument("--binary", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--stage", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        stage(arguments.module, arguments.stage)
    if arguments.out is not None:
        wheels(arguments.module, arguments.binary, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
