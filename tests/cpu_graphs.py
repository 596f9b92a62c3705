"""CUDA graphs on a CPU, for tests of what is captured and when it is replayed.

A captured step is a list of operations with fixed tensors: torch's own, and the reference of each kernel as one. As on a GPU a
capture changes nothing (what it wrote is undone), what would wait for the device is refused, and a replay runs no Python of the
model: a tensor that has been replaced since, or a length that was a number, shows as a wrong answer. There is one stream.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hisparse import graphs
from hisparse_kernels import reference

_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
}


class CpuGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], Any]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for operation in self.operations:
            operation()

    def __del__(self) -> None:
        if _Capture.current is not None:
            _Capture.current.broken = True


class _Capture(TorchDispatchMode):
    """Runs operations, notes them in a graph, and undoes in the end what they wrote."""

    current: _Capture | None = None

    def __init__(self, graph: CpuGraph) -> None:
        super().__init__()
        self.graph = graph
        self.in_kernel = False
        self.broken = False
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_kernel:
            return function(*args, **kwargs)
        if function in _WAITS:
            raise RuntimeError(f"{function} waits for the device: not permitted in a capture")
        writes = function._schema.is_mutable
        if writes:
            self.keep(args, kwargs)
        return self.note(function, args, kwargs, writes)

    def keep(self, *arguments: Any) -> None:
        """Note what tensors hold that may be written to, which expanded ones may not."""
        for tensor in _tensors(arguments):
            if all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                self._before.append((tensor, tensor.clone()))

    def note(self, function: Any, args: Any, kwargs: Any, writes: bool) -> Any:
        """Run a function, and in each replay again, into the same results; not what only gives views."""
        output = function(*args, **kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        is_new = [_memory(tensor) not in given for tensor in _tensors(output)]

        def again() -> None:
            results = _tensors(function(*args, **kwargs))
            for old, result, new in zip(_tensors(output), results, is_new, strict=True):
                if new:
                    old.copy_(result)

        if writes or any(is_new):
            self.graph.operations.append(again)
        return output

    @torch.inference_mode()
    def undo(self) -> None:
        for tensor, held in reversed(self._before):
            tensor.copy_(held)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _capture(graph: CpuGraph) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    capture = _Capture.current = _Capture(graph)
    try:
        with capture:
            yield
        if capture.broken:
            raise RuntimeError("another graph was destroyed meanwhile")
    except BaseException as error:  # as CUDA does where a stream on the side is not waited for
        raise RuntimeError("operation failed due to a previous error during capture") from error
    finally:
        _Capture.current = None
        capture.undo()


def _as_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that a capture notes as one operation: its reference reads the position on the CPU."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        capture = _Capture.current
        if capture is None or capture.in_kernel:
            return kernel(*args, **kwargs)
        capture.in_kernel = True
        try:
            capture.keep(args, kwargs)
            return capture.note(kernel, args, kwargs, writes=True)
        finally:
            capture.in_kernel = False

    return call


def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode steps be captured and replayed on a CPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuGraph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: _Capture.current is not None)
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    for name, kernel in inspect.getmembers(reference, inspect.isfunction):
        if kernel.__module__ == reference.__name__ and not name.startswith("_"):
            monkeypatch.setattr(reference, name, _as_one(kernel))
