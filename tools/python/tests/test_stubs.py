"""Type stubs match the modules: the same names, and the same parameter names, order and defaults."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import unittest

import kvplane
import mooncake

STUBS = {
    "kvplane._native": (kvplane, "_native.pyi"),
    "mooncake.engine": (mooncake, "engine.pyi"),
    "mooncake.store": (mooncake, "store.pyi"),
}

if importlib.util.find_spec("numpy"):
    # Modules that need numpy.
    STUBS["mooncake.ep"] = (mooncake, "ep.pyi")
    STUBS["mooncake.mooncake_elastic_buffer"] = (mooncake, "mooncake_elastic_buffer.pyi")
    STUBS["mooncake.mooncake_ep_buffer"] = (mooncake, "mooncake_ep_buffer.pyi")

#: Names that exist only in stubs, as types of other names.
ALIASES = {"Buffer", "capsule"}

#: Names that our modules import from one another and that Mooncake does not have.
OURS = {"INTERNAL_ERROR", "INVALID_PARAMS", "NOT_SUPPORTED", "OBJECT_NOT_FOUND", "parse_size", "unknown_key"}


def parsed(name):
    """Parses a stub into statements."""
    package, file = STUBS[name]
    path = pathlib.Path(package.__file__).parent / file
    return ast.parse(path.read_text(), str(path), feature_version=(3, 9)).body


def declared(body):
    """Names that a module or class declares, each with its statements."""
    found = {}
    for item in body:
        if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(item.name, []).append(item)
        elif isinstance(item, ast.AnnAssign):
            found.setdefault(item.target.id, []).append(item)
        elif isinstance(item, ast.Assign):
            # A type alias, or a member of an enumeration.
            found.setdefault(item.targets[0].id, []).append(item)
    return found


def row(name, optional, named):
    """A parameter; the name of a positional-only one is ignored."""
    return (name if named else "", optional, named)


def of_stub(function, bound):
    """Parameters in a stub: name, whether optional, whether it can be passed by keyword."""
    arguments = function.args
    several = [*arguments.posonlyargs, *arguments.args]
    left_out = [False] * (len(several) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    only = len(arguments.posonlyargs)
    rows = [
        row(one.arg, optional, not (at < only or one.arg.startswith("__")))
        for at, (one, optional) in enumerate(zip(several, left_out))
    ]
    rows += [row(one.arg, default is not None, True) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return rows[1:] if bound else rows


def of_module(function, bound):
    """Parameters of the module's function in the same form; None if it takes any arguments."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return None
    rows = [row(one.name, one.default is not one.empty, one.kind != one.POSITIONAL_ONLY) for one in parameters]
    return rows[1:] if bound else rows


def imported(module):
    """Names that a module imports, and names of modules."""
    found = set()
    for item in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(item, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name.partition(".")[0] for one in item.names}
    return found


def is_static(function):
    return any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)


class Stubs(unittest.TestCase):
    maxDiff = None

    def compare(self, name, functions, real, bound):
        """Compares one function or method."""
        if len(functions) > 1:
            # Overloads: the module dispatches at run time.
            self.assertTrue(callable(real), name)
            return
        theirs = of_module(real, bound)
        with self.subTest(name):
            if theirs is not None:
                self.assertEqual(of_stub(functions[0], bound), theirs)

    def compare_class(self, name, body, real):
        stub = declared(body)
        public = {one for one in vars(real) if not one.startswith("_")}
        for base in real.__mro__[1:]:
            # Members inherited from an enumeration or tuple come from the base class in the stub.
            if base.__module__ == real.__module__:
                public |= {one for one in vars(base) if not one.startswith("_")}
        inherited = [one.id for one in getattr(body, "bases", []) if isinstance(one, ast.Name)]
        missing = public - set(stub)
        self.assertEqual(missing, set(), f"{name}: not in the stub (bases {inherited})")
        for attribute, items in stub.items():
            if isinstance(items[0], ast.FunctionDef):
                if attribute == "__init__":
                    continue
                self.assertTrue(hasattr(real, attribute), f"{name}.{attribute} is only in the stub")
                static = is_static(items[0])
                self.compare(f"{name}.{attribute}", items, getattr(real, attribute), not static)

    def test_stubs_and_modules_agree(self):
        for module in STUBS:
            with self.subTest(module):
                real = importlib.import_module(module)
                stub = declared(parsed(module))
                aliases = {one for one, items in stub.items() if isinstance(items[0], ast.Assign)}
                names = set(stub) - aliases - {one for one in ALIASES if not hasattr(real, one)}
                own = {one for one in dir(real) if not one.startswith("_")}
                if module != "kvplane._native":
                    own -= (imported(real) | OURS) - names
                self.assertEqual(own - names - aliases, set(), f"{module}: not in the stub")
                self.assertEqual({one for one in names if not hasattr(real, one)}, set(), f"{module}: only in the stub")
                for one, items in stub.items():
                    if one in aliases:
                        continue
                    if isinstance(items[0], ast.FunctionDef):
                        self.compare(f"{module}.{one}", items, getattr(real, one), False)
                    elif isinstance(items[0], ast.ClassDef):
                        self.compare_class(f"{module}.{one}", items[0].body, getattr(real, one))

    def test_what_has_no_stub_is_annotated(self):
        # Type checkers read the source of these modules.
        modules = ["_store", "_engine", "_async", "_scheduler", "p2p", "group", "_arrays", "_program"]
        for module in [f"kvplane.{one}" for one in modules]:
            real = importlib.import_module(module)
            for name, one in vars(real).items():
                if name.startswith("_") or getattr(one, "__module__", None) != module:
                    continue
                functions = vars(one).items() if inspect.isclass(one) else [(name, one)]
                for inner, function in functions:
                    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
                    if inner.startswith("_") and inner != "__init__" or not inspect.isfunction(function):
                        continue
                    with self.subTest(f"{module}.{name}.{inner}"):
                        parameters = list(inspect.signature(function).parameters.values())
                        bare = [
                            parameter.name
                            for parameter in parameters
                            if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
                        ]
                        self.assertEqual(bare, [])


if __name__ == "__main__":
    unittest.main()
