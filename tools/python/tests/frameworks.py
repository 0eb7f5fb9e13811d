"""The classes of vLLM and LMCache that connectors are made of, from their packages, on hosts without torch and a GPU.

`KVPLANE_VLLM` and `KVPLANE_LMCACHE` name directories with unpacked wheels (`pip download --no-deps vllm`, `unzip`). The
modules listed here are imported from there as they are; their packages' own initializations are left out, and what else
they import of their framework, or is not installed, has stand-ins, which the tests do not reach. Without a directory, a
framework is imported as it is installed.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
import types
import unittest

#: Modules that are imported as they are, by framework: these, and what is below them.
REAL = {
    "vllm": (
        "vllm.v1.kv_offload.base",
        "vllm.utils.math_utils",
        "vllm.v1.kv_offload.config",
        "vllm.v1.kv_offload.cpu.common",
        "vllm.v1.kv_offload.cpu.manager",
        "vllm.v1.kv_offload.cpu.policies",
        "vllm.v1.kv_offload.factory",
        "vllm.v1.kv_offload.file_mapper",
        "vllm.v1.kv_offload.tiering.async_lookup",
        "vllm.v1.kv_offload.tiering.backpressure",
        "vllm.v1.kv_offload.tiering.base",
        "vllm.v1.kv_offload.tiering.factory",
        "vllm.v1.kv_offload.tiering.fs",
        "vllm.v1.kv_offload.tiering.manager",
        "vllm.v1.kv_offload.tiering.metrics",
        "vllm.v1.kv_hints",
        "vllm.v1.metrics.cache_hit_source",
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
    ),
    "lmcache": (
        "lmcache.v1.distributed.api",
        "lmcache.v1.distributed.error",
        "lmcache.v1.distributed.internal_api",
        "lmcache.v1.distributed.l2_adapters.base",
        "lmcache.v1.distributed.l2_adapters.config",
        "lmcache.v1.distributed.l2_adapters.factory",
        "lmcache.v1.distributed.l2_adapters.fs_l2_adapter",
        "lmcache.v1.distributed.l2_adapters.plugin_l2_adapter",
        "lmcache.v1.mp_observability.event",
        "lmcache.v1.mp_observability.event_bus",
        "lmcache.v1.platform.event_notifier",
    ),
}
#: Compiled modules that the frameworks do without: they are linked with torch, and cannot be imported without it.
NATIVE = ("vllm.fs_io_C",)
#: Packages of others that the listed modules import: stand-ins where they are missing.
OTHERS = ("torch", "msgspec", "prometheus_client", "typing_extensions", "opentelemetry", "aiofiles")
VARIABLES = {"vllm": "KVPLANE_VLLM", "lmcache": "KVPLANE_LMCACHE"}


class _Kind(type):
    """Classes that stand in for anything: with any arguments, items and attributes."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def _stand_in(name):
    def ignore(*arguments, **keywords):
        return None

    return _Kind(name, (), {"__init__": ignore, "__init_subclass__": classmethod(ignore)})


class _StandIn(types.ModuleType):
    """Module that has every name."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _stand_in(name))
        return getattr(self, name)


class Bitmap:
    """LMCache's bitmap, whose own module is linked with torch: the calls that adapters and these tests make."""

    def __init__(self, size, prefix_bits=0):
        self._bits = [at < prefix_bits for at in range(size)]

    def set(self, index):
        self._bits[index] = True

    def batched_set(self, indices):
        for index in indices:
            if index < len(self._bits):
                self._bits[index] = True

    def test(self, index):
        return self._bits[index]

    def popcount(self):
        return sum(self._bits)

    def get_indices_list(self):
        return [at for at, bit in enumerate(self._bits) if bit]


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads stand-ins for modules."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in OTHERS else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        fill = _FILLED.get(module.__name__)
        if fill is not None:
            fill(module)


class _Finder(_Loader):
    """Finds the listed modules of a framework in its directory, and stand-ins for its others."""

    def __init__(self, framework, root):
        self._framework, self._root = framework, root

    def _is_real(self, name):
        return any(name == real or name.startswith(real + ".") for real in REAL[self._framework])

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != self._framework:
            return None
        place = self._root.joinpath(*name.split("."))
        if name in NATIVE:
            library = next(place.parent.glob(f"{place.name}.*.so"), None)
            return importlib.util.spec_from_file_location(name, library) if library is not None else None
        if self._is_real(name):
            file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
            places = [str(place)] if place.is_dir() else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)


def _logger(module):
    class Logger(logging.Logger):
        """Logger with the calls of both frameworks."""

        warning_once, info_once, debug_once = logging.Logger.warning, logging.Logger.info, logging.Logger.debug

    module.init_logger = lambda name, *rest: Logger(name, logging.ERROR)


def _notifier(module):
    from lmcache.v1.platform.event_notifier import create_event_notifier

    module.create_event_notifier = create_event_notifier


def _bitmap(module):
    module.Bitmap = Bitmap


def _typing(module):
    module.override = lambda function: function


def _metrics(module):
    module.register_gauge = lambda *arguments, **keywords: None


_FILLED = {
    "vllm.logger": _logger,
    "lmcache.logging": _logger,
    "lmcache.v1.platform": _notifier,
    "lmcache.lmcache_native": _bitmap,
    "lmcache.v1.mp_observability.otel_init": _metrics,
    "typing_extensions": _typing,
}


_LOADED = set()


def load(framework):
    """Makes the classes of a framework importable. Raises SkipTest where there is no directory with them."""
    if framework in _LOADED:
        return
    variable = VARIABLES[framework]
    root = os.environ.get(variable)
    if not root:
        try:
            importlib.import_module(REAL[framework][0])
        except ImportError as error:
            reason = f"{variable} names no directory with {framework}'s package, and it is not installed: {error}"
            raise unittest.SkipTest(reason) from None
        return
    if not (pathlib.Path(root) / framework).is_dir():
        raise unittest.SkipTest(f"{variable}={root} has no {framework}")
    if importlib.util.find_spec("numpy") is None:
        raise unittest.SkipTest("numpy is not installed")
    if not _LOADED:
        # After the finders of what is installed: stand-ins are for what is not.
        sys.meta_path.append(_Loader())
    _LOADED.add(framework)
    sys.meta_path.insert(0, _Finder(framework, pathlib.Path(root)))
