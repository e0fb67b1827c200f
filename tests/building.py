"""What Inductor generated for a graph, built by one call of g++ in place of one a kernel: half of the suite's time.

    kernel_a = cpp_pybinding(types, source)           one library:   namespace k0 { source of a, its binding }
    kernel_b = cpp_pybinding(types, source)                          namespace k1 { source of b, its binding }
    async_compile.wait(globals())              -->    builds it, and puts the functions where the names are

Reading its headers takes g++ longer than most kernels do. The sources are Inductor's as they are, and so are the flags.
What starts processes of its own (the demo, saved graphs) builds as users do, and so do the vectorized rows of the matrix.
"""

from __future__ import annotations

import re
import types
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

_INCLUDES = "\n".join(
    f"#include <{name}>"
    for name in ("torch/csrc/inductor/cpp_prefix.h", "Python.h", "sstream", "cstdlib", "cerrno", "stdexcept")
)


class _Kernel:
    """One that is to be built."""

    def __init__(self, argtypes: list[str], source: str) -> None:
        self.argtypes, self.source = argtypes, source

    def in_namespace(self, name: str) -> str:
        # Equal names of C are one function, in whatever namespaces.
        source, count = re.subn(r'extern "C"\s+void\s+kernel\(', "void kernel(", self.source)
        assert count == 1, self.source
        arguments = ", ".join(
            f"parse_arg<{one.replace('const ', '')}>(args, {place})" for place, one in enumerate(self.argtypes)
        )
        binding = CppPythonBindingsCodeCache.suffix_template.format(
            arg_len=len(self.argtypes),
            call_entry_func=CppPythonBindingsCodeCache.call_entry_function.format(arguments),
            entry_func=name,
            extra_parse_arg="",
        )
        return f"namespace {name}_ {{\n{source}\n{binding}\n}}\n"


class _Libraries(CppPythonBindingsCodeCache):
    """Those that were built, by their sources."""

    cache: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return types.SimpleNamespace(path=path)

    @classmethod
    def functions_of(cls, kernels: list[_Kernel]) -> list[Any]:
        names = [f"k{place}" for place in range(len(kernels))]
        library = cls.load("\n".join([_INCLUDES, *map(_Kernel.in_namespace, kernels, names)]))
        if not hasattr(library, "functions"):
            library.functions = [_function(library, name) for name in names]
        return library.functions


def _function(library: Any, name: str) -> Any:
    """The binding of that name, loaded as Inductor loads one."""
    binding = type(name, (CppPythonBindingsCodeCache,), {"entry_function": name})
    return getattr(binding._load_library_inner(library.path, library.key), name)


def build_graphs_at_once() -> None:
    """From now on, in this process."""
    AsyncCompile.cpp_pybinding, AsyncCompile.wait = _note, _build  # type: ignore[method-assign]


def as_inductor_builds() -> AbstractContextManager[Any]:
    """Kernel by kernel, as users have it."""
    return mock.patch.multiple(AsyncCompile, cpp_pybinding=_build_one, wait=_wait)


_build_one, _wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait


def _note(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
    return _Kernel(argtypes, source_code)


def _build(self: AsyncCompile, scope: dict[str, Any]) -> None:
    noted = {name: kernel for name, kernel in scope.items() if isinstance(kernel, _Kernel)}
    if noted:
        scope.update(zip(noted, _Libraries.functions_of(list(noted.values()))))
    _wait(self, scope)
