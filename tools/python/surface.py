"""Compares the packages' interface with the recorded ones of Mooncake, name by name.

    python surface.py            prints what is missing; exit status 1 when anything is
    python surface.py --write    writes docstrings' signatures and type stubs, from the recordings

A recording, `golden/mooncake-VERSION.txt`, is what `dir()` and `__doc__` say of the original's wheel of that version.
Names of either recording are required; where both have a signature, the newer one is written.
"""

import enum
import importlib
import inspect
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
#: Versions with a recording, the oldest first.
VERSIONS = ("0.3.13", "0.3.14")
PACKAGE = HERE / "package" / "mooncake"
WRITTEN = PACKAGE / "_signatures.py"

#: Internals of pybind11 that nobody calls.
INTERNAL = {"_pybind11_conduit_v1_"}
#: Calls that need EFA: they exist and raise NotImplementedError with a reason.
HARDWARE = {"mooncake.engine.TransferEngine.warmup_efa_segment"}


#: Calls that need a driver of CUDA: they do what their signature says where one answers, else they raise
#: NotImplementedError with that reason.
DRIVERS = {
    f"mooncake.engine.TransferEngine.{name}"
    for name in (
        "transfer_write_on_cuda", "transfer_read_on_cuda", "batch_transfer_write_on_cuda", "batch_transfer_read_on_cuda",
    )
}  # fmt: skip


def lines_of(version):
    """Lines of a recording."""
    return (GOLDEN / f"mooncake-{version}.txt").read_text(encoding="utf-8").splitlines()


def recorded(version):
    """Triples of module, path in it, and recorded signature or kind."""
    return with_kinds() if version == "0.3.13" else by_names(version)


def by_names(version):
    """The same of a recording with a full name and perhaps a signature in each line."""
    lines = [line.partition(" ")[::2] for line in lines_of(version)]
    owners = {name.rpartition(".")[0] for name, _ in lines}
    for name, signature in lines:
        module = ".".join(name.split(".")[:2])
        path = name[len(module) + 1 :]
        owner, _, last = path.rpartition(".")
        if not owner:
            kind = "class" if name in owners else "name"
        elif last.isupper() or last in ("Read", "Write"):
            kind = owner
        else:
            kind = "property"
        yield module, path, signature or kind


def merged():
    """The triples of all recordings, class by class, and then what is in no class."""
    groups = {}
    for version in VERSIONS:
        for module, path, what in recorded(version):
            owner = path if what == "class" else path.rpartition(".")[0]
            group = groups.setdefault((module, owner), {})
            known = group.get(path)
            # Overloads are told by the older recording; a name's value, too.
            if known is None or ("(" in what and "*args, **kwargs" not in what):
                group[path] = what
    for wanted in (True, False):
        for (module, owner), group in groups.items():
            if bool(owner) is wanted:
                for path, what in group.items():
                    yield module, path, what


def with_kinds():
    """The same of a recording with a kind for each name and a line for each class."""
    module, owner = "mooncake.engine", ""
    for line in lines_of("0.3.13"):
        if line.startswith("class "):
            module, _, owner = line[6:].rpartition(".")
            yield module, owner, "class"
        elif line.startswith("    "):
            name, _, what = line.strip().partition(" | ")
            yield module, f"{owner}.{name}", what
        elif line.startswith("attr "):
            name, _, what = line[5:].partition(" ")
            if name == "ACTIVATION":
                module = "mooncake.store"
            yield module, name, f"attr {what}"
        elif line.startswith("func "):
            name, _, what = line[5:].partition(" ")
            if name.startswith("_") or name.startswith("bind_"):
                module = "mooncake.store"
            yield module, name, what.strip("[]'")


def find(module, path):
    """Resolves a path; raises LookupError if it does not exist."""
    thing = importlib.import_module(module)
    for name in path.split("."):
        try:
            thing = getattr(thing, name)
        except AttributeError as error:
            cls = thing
            # Set in `__init__`: only instances have it.
            try:
                thing = getattr(next(iter(cls)) if issubclass(cls, enum.Enum) else cls(), name)
            except Exception:
                raise LookupError(path) from error
    return thing


def parameters(signature):
    """Names of the named parameters, without self."""
    inside = re.sub(r"\w+\[[^()]*?\](?=[,)= ])", "", signature)
    names = re.findall(r"[(,] ?(\**\w+)(?=:|,|\))", inside.split(" -> ")[0])
    return [name for name in names if name != "self" and not re.fullmatch(r"arg\d+|\*+\w+", name)]


def check():
    """Prints the missing names and returns their number."""
    return sum(check_of(version) for version in VERSIONS)


def check_of(version):
    """Prints the names of a recording that are missing or different, and returns their number."""
    missing = same = 0
    for module, path, what in recorded(version):
        if path.split(".")[-1] in INTERNAL:
            continue
        try:
            thing = find(module, path)
        except LookupError:
            print(f"missing: {module}.{path}")
            missing += 1
            continue
        same += 1
        if what.startswith("attr ") and repr(thing) != what[5:]:
            print(f"different: {module}.{path} is {thing!r}, not {what[5:]}")
            missing += 1
        if "(" in what and callable(thing) and not path.endswith("__"):
            missing += differs(module, path, what, thing)
    missing += sum(raises_no_reason(name) for name in sorted(HARDWARE | DRIVERS))
    print(f"surface of {version}: {same} names there, {missing} missing or different, "
          f"{len(HARDWARE)} that raise NotImplementedError for want of hardware support, {len(DRIVERS)} where no driver "
          f"answers")
    return missing


def raises_no_reason(name):
    """1 if a call that is not supported on this host does something else than raise NotImplementedError with a reason."""
    module, path = name.rsplit(".", 2)[0], name.split(".")[-2:]
    if name in DRIVERS and importlib.import_module("mooncake._devices").is_available("cuda"):
        return 0
    call = find(module, ".".join(path))
    wanted = sum(one.default is one.empty for one in inspect.signature(call).parameters.values()) - 1
    owner = find(module, path[0])()
    try:
        call(owner, *[[] if "batch" in path[1] else 0] * wanted)
    except NotImplementedError as error:
        if str(error):
            return 0
    except Exception as error:
        print(f"different: {name} raises {error!r}, not NotImplementedError")
        return 1
    print(f"different: {name} does not raise NotImplementedError with a reason")
    return 1


def differs(module, path, what, thing):
    """1 if a parameter name is not accepted or the docstring does not begin with the signature."""
    try:
        taken = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return 0
    anything = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    lost = [name for name in parameters(what) if name not in taken and not anything]
    if lost:
        print(f"different: {module}.{path} does not take {', '.join(lost)}")
        return 1
    first = re.sub(r"^\d+\. ", "", what.split(" || ")[0])
    if first.split("(")[0] not in (thing.__doc__ or ""):
        print(f"different: {module}.{path} has no docstring with its signature")
        return 1
    return 0


def write():
    """Writes the module of signatures."""
    lines = [
        '"""Signatures of Mooncake that docstrings begin with: callers search for words in them.',
        "",
        'Written by `surface.py --write`."""',
        "",
        "SIGNATURES = {",
    ]
    for module, path, what in merged():
        name = path.split(".")[-1]
        if "(" not in what or what.startswith("attr") or name in INTERNAL or name == "__init__":
            continue
        lines.append(f"    {module + '.' + path!r}: {what.replace(' || ', chr(10))!r},")
    lines += [
        "}",
        "",
        "",
        "def apply(module, name):",
        '    """Prepends each signature to the docstring of its function in a module."""',
        '    for path, text in SIGNATURES.items():',
        '        if not path.startswith(name + "."):',
        "            continue",
        '        owner, _, last = path[len(name) + 1 :].rpartition(".")',
        "        holder = getattr(module, owner, None) if owner else module",
        "        function = getattr(holder, last, None)",
        '        function = getattr(function, "__func__", function)',
        '        code = getattr(function, "__code__", None)',
        "        if code is None or (function.__doc__ or \"\").startswith(text[:8]):",
        "            continue",
        '        function.__doc__ = f"{text}\\n\\n{function.__doc__ or str()}"',
        "",
    ]
    WRITTEN.write_text("\n".join(lines), encoding="utf-8")


def stub(text):
    """Converts a pybind11 signature to a line of a stub."""
    name, _, rest = text.partition("(")
    inside, _, result = rest.rpartition(") -> ")
    inside = re.sub(r"\bself: [\w.]+", "self", inside)
    inside = re.sub(r" = <?[\w.() ]+>?(?=,|$)| = '[^']*'", " = ...", inside)
    inside = re.sub(r"\barg(\d+): ", r"__arg\1: ", inside)
    # Python does not allow a parameter without default after one with a default.
    if re.search(r"= \.\.\., \w+: [\w.\[\]]+(,|$)", inside) and "*args" not in inside:
        inside = re.sub(r"(\w+: [\w.\[\]]+)(?=,|$)", r"\1 = ...", inside)
    for module in ("mooncake.store.", "mooncake.engine.", "mooncake::"):
        inside, result = inside.replace(module, ""), result.replace(module, "")
    unknown = {"MooncakeStorePyWrapper": "Any", "TransferEngine" if name == "get_engine" else "-": "InnerTransferEngine"}
    for word, known in unknown.items():
        inside, result = re.sub(rf"\b{word}\b", known, inside), re.sub(rf"\b{word}\b", known, result)
    result = re.sub(r"numpy\.ndarray\[.*\]", "Any", result)
    replaced = [re.sub(r"\bobject\b", "Any", part) for part in (inside, result)]
    return f"def {name}({replaced[0]}) -> {replaced[1]}: ..."


def write_stubs():
    """Writes the type stubs of both modules."""
    lines = {"mooncake.engine": [], "mooncake.store": []}
    for module, path, what in merged():
        owner, _, name = path.rpartition(".")
        out = lines[module]
        if name in INTERNAL or name in ("__init__", "__len__"):
            continue
        if what == "class":
            base = "(Enum)" if path in ("TransferOpcode", "ScatterTransferCompletionStatus") else "(IntEnum)" if path.endswith(IntEnums) else ""
            out.append(f"class {path}{base}:")
            out.append("    def __init__(self, *args: Any, **kwargs: Any) -> None: ...")
            out.extend(f"    {one}: {kind}" for one, kind in ATTRIBUTES.get(path, {}).items())
        elif what == "name":
            out.append(f"{path}: Any")
        elif what == "property":
            if not owner.endswith(IntEnums) and name not in ATTRIBUTES.get(owner, {}):
                out.append(f"    {name}: Any")
        elif what.startswith("attr "):
            out.append(f"{name}: Any")
        elif "(" in what:
            if owner.endswith(IntEnums):
                continue
            forms = [re.sub(r"^\d+\. ", "", form) for form in what.split(" || ")]
            indent = "    " if owner else ""
            for form in forms:
                if len(forms) > 1:
                    out.append(f"{indent}@overload")
                if owner and "self" not in form:
                    out.append(f"{indent}@staticmethod")
                out.append(indent + stub(form))
        elif owner.endswith(IntEnums):
            out.append(f"    {name} = ...")
    for module, body in lines.items():
        head = ['"""Written by `surface.py --write`."""', "", "from enum import Enum, IntEnum",
                "from typing import Any, Callable, List, Optional, overload", "", "Buffer = Any", "capsule = Any", ""]
        place = PACKAGE / f"{module.rpartition('.')[2]}.pyi"
        place.write_text("\n".join(head + body) + "\n", encoding="utf-8")


#: Types of attributes, which the recording lacks.
ATTRIBUTES = {
    "ReplicateConfig": {
        "replica_num": "int",
        "nof_replica_num": "int",
        "dfs_replica_num": "int",
        "soft_pin_action": "SoftPinAction",
        "soft_pin_ttl_ms": "Optional[int]",
        "with_soft_pin": "bool",
        "with_hard_pin": "bool",
        "preferred_segment": "str",
        "preferred_segments": "List[str]",
        "preferred_nof_segments": "List[str]",
        "prefer_alloc_in_same_node": "bool",
        "data_type": "ObjectDataType",
        "group_ids": "Optional[List[str]]",
        "session_ids": "Optional[List[str]]",
        "residency_affinity_ids": "Optional[List[str]]",
        "preferred_hca_names": "Optional[List[str]]",
        "per_key_preferred_hca_names": "Optional[List[List[str]]]",
    },
    "ExistOptions": {"prefetch_to_memory": "bool"},
    "ScatterTransferTicket": {"status": "ScatterTransferCompletionStatus", "drained": "bool"},
    "TransferEngine": {"TransferOpcode": "Any"},
    "TransferNotify": {"name": "str", "msg": "str"},
}
#: Classes that are enumerations.
IntEnums = ("ObjectDataType", "ReplicaStatus", "SoftPinAction", "TaskStatus", "TaskType", "TransferOpcode",
            "ScatterTransferCompletionStatus")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
        write_stubs()
    else:
        sys.exit(1 if check() else 0)
