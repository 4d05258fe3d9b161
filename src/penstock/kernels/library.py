"""The native library and its contexts: threads, the kernels for this processor, and the calls that use them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.kernels.build import library_path
from penstock.kernels.structs import BatchStruct, MatrixStruct, ModelStruct

INTERFACE = 6
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
# how to choose a token: ps_choice, field by field
CHOICE = np.dtype([("noise", "f8"), ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4")])
_ITEM = ctypes.CFUNCTYPE(None, c_void_p, c_int)


class KernelsError(PenstockError):
    """A call of the native kernels was refused."""


@cache
def load() -> ctypes.CDLL | None:
    """The library of this version, or None where it was not compiled or cannot be loaded."""
    path = library_path()
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # compiled for another machine
        return None
    if library.ps_interface() != INTERFACE:
        return None
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    floats, ints, context = POINTER(c_float), POINTER(c_int32), c_void_p
    for name, result, arguments in (
        ("ps_error", c_char_p, []),
        ("ps_path", c_char_p, [c_int]),
        ("ps_path_usable", c_int, [c_char_p]),
        ("ps_context_new", context, [c_int, c_char_p]),
        ("ps_context_free", None, [context]),
        ("ps_context_path", c_char_p, [context]),
        ("ps_context_threads", c_int, [context]),
        ("ps_packed_bytes", c_size_t, [c_int, c_int, c_int]),
        ("ps_natural_kind", c_int, [c_int]),
        ("ps_pack", c_int, [MatrixStruct, c_void_p, c_int, c_int, c_int, c_void_p, ints]),
        ("ps_unpack", c_int, [MatrixStruct, c_int, c_int, floats]),
        ("ps_product", c_int, [context, MatrixStruct, c_int, floats, floats]),
        ("ps_run_layers", c_int, [context, POINTER(ModelStruct), c_int, c_int, POINTER(BatchStruct), floats]),
        ("ps_embed", c_int, [context, MatrixStruct, c_int, ints, c_float, floats]),
        ("ps_head", c_int, [context, MatrixStruct, floats, c_float, c_int, floats, c_int, floats]),
        ("ps_pick", c_int, [context, c_int, c_int, floats, c_void_p, ints]),
        ("ps_rms_norm", c_int, [context, c_int, c_int, floats, floats, c_float, floats]),
        ("ps_gate", c_int, [context, c_int, c_int, c_int, floats, floats]),
        ("ps_attention", c_int, [context, POINTER(ModelStruct), c_int, POINTER(BatchStruct), floats, floats]),
        ("ps_parallel", c_int, [context, c_int, _ITEM, c_void_p]),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def require() -> ctypes.CDLL:
    library = load()
    if library is None:
        raise KernelsError(
            "The native kernels are not compiled.", hint="Install a C++ compiler, then run: python -m penstock.kernels.build"
        )
    return library


def check(result: int) -> None:
    if result < 0:
        raise KernelsError(require().ps_error().decode())


def usable_paths() -> list[str]:
    """The sets of kernels that this processor can run, best first; empty without the library."""
    library = load()
    names: list[str] = []
    if library is not None:
        while name := library.ps_path(len(names)):
            names.append(name.decode())
        names = [name for name in names if library.ps_path_usable(name.encode())]
    return names


def floats(array: Floats) -> ctypes._Pointer[c_float]:
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return array.ctypes.data_as(POINTER(c_float))


def ints(array: Ints) -> ctypes._Pointer[c_int32]:
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    return array.ctypes.data_as(POINTER(c_int32))


class SpanColumns:
    """Spans as columns: span i is n[i] rows at positions from start[i], with its block table at tables[table[i]]."""

    def __init__(self, tables: Ints, table: Ints, start: Ints, n: Ints) -> None:
        assert len(table) == len(start) == len(n)
        self.rows = int(n.sum())
        self._arrays = (tables, table, start, n)
        self.struct = BatchStruct(len(n), tables.size, ints(tables), ints(table), ints(start), ints(n))

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, Sequence[int]]]) -> SpanColumns:
        """From (start, n, block table) of each span."""
        lengths = [len(table) for _, _, table in spans]
        return cls(
            np.array([block for _, _, table in spans for block in table], np.int32),
            np.array([sum(lengths[:i]) for i in range(len(spans))], np.int32),
            np.array([start for start, _, _ in spans], np.int32),
            np.array([n for _, n, _ in spans], np.int32),
        )


class KernelContext:
    """Threads and scratch memory for calls, one at a time. Calls release the GIL."""

    def __init__(self, threads: int = 0, path: str | None = None) -> None:
        self._library = require()
        handle = self._library.ps_context_new(threads, None if path is None else path.encode())
        if not handle:
            raise KernelsError(self._library.ps_error().decode())
        self._handle = c_void_p(handle)
        weakref.finalize(self, self._library.ps_context_free, self._handle).atexit = False

    @property
    def path(self) -> str:
        return str(self._library.ps_context_path(self._handle).decode())

    @property
    def threads(self) -> int:
        return int(self._library.ps_context_threads(self._handle))

    def product(self, matrix: MatrixStruct, x: Floats) -> Floats:
        """x [m, cols] -> [m, rows]"""
        assert x.shape[1] == matrix.cols
        out = np.empty((len(x), matrix.rows), np.float32)
        check(self._library.ps_product(self._handle, matrix, len(x), floats(x), floats(out)))
        return out

    def run_layers(self, model: ModelStruct, first: int, last: int, batch: SpanColumns, hidden: Floats) -> None:
        """Run hidden [rows, hidden] through layers [first, last) in place."""
        assert hidden.shape == (batch.rows, model.hidden)
        check(self._library.ps_run_layers(self._handle, model, first, last, batch.struct, floats(hidden)))

    def embed(self, matrix: MatrixStruct, ids: Ints, scale: float = 1.0) -> Floats:
        out = np.empty((len(ids), matrix.cols), np.float32)
        check(self._library.ps_embed(self._handle, matrix, len(ids), ints(ids), scale, floats(out)))
        return out

    def head(self, matrix: MatrixStruct, norm: Floats | None, eps: float, hidden: Floats, *, refined: int = 0) -> Floats:
        """Logits [m, vocabulary]. norm: None for normed states. refined: how many best logits use inputs that are not rounded."""
        assert hidden.shape[1] == matrix.cols
        out = np.empty((len(hidden), matrix.rows), np.float32)
        weight = None if norm is None else floats(norm)
        check(self._library.ps_head(self._handle, matrix, weight, eps, len(hidden), floats(hidden), refined, floats(out)))
        return out

    def pick(self, logits: Floats, choices: NDArray[np.void]) -> Ints:
        """A token for each row of logits [m, vocabulary], or -1 where a difference in rounding could make it another one.

        choices: of the type CHOICE.
        """
        assert choices.dtype == CHOICE
        assert len(choices) == len(logits)
        tokens = np.empty(len(logits), np.int32)
        check(self._library.ps_pick(self._handle, *logits.shape, floats(logits), choices.ctypes.data, ints(tokens)))
        return tokens

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        out = np.empty_like(x)
        check(self._library.ps_rms_norm(self._handle, *x.shape, floats(x), floats(weight), eps, floats(out)))
        return out

    def gate(self, activation: int, gate_up: Floats) -> Floats:
        """[m, 2n] -> [m, n]"""
        m, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = np.empty((m, n), np.float32)
        check(self._library.ps_gate(self._handle, activation, m, n, floats(gate_up), floats(out)))
        return out

    def attention(self, model: ModelStruct, layer: int, batch: SpanColumns, qkv: Floats) -> Floats:
        """Rotate qkv in place, store its keys and values, and return what the queries see."""
        out = np.empty((batch.rows, model.heads * model.head_dim), np.float32)
        check(self._library.ps_attention(self._handle, model, layer, batch.struct, floats(qkv), floats(out)))
        return out

    def parallel(self, items: int, run: Callable[[int], None]) -> None:
        """Call run(i) for each i below items on the context's threads."""
        check(self._library.ps_parallel(self._handle, items, _ITEM(lambda _, item: run(item)), None))
