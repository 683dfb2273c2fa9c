"""The CPU kernel in C++ (native.cpp): output and every statistic in one pass, forward and backward.

This module finds the compiled libraries beside itself, picks the widest that this processor runs,
describes a problem to it in one struct, and gives its results as `RowStats`. `SCALEDOT_ISA`
(baseline, avx2 or avx512) forces a variant. `available()` says in one line why there is none, and
nothing else here may be called then.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scaledot.kernels import SUMS, Gradients, Terms, fold, row_constants, row_gradients
from scaledot.masks import Visibility
from scaledot.rows import RowStats

FLOATS = 12
"""Float statistics of a row, in the order of native.cpp's `enum Field`."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MASK_DTYPES = DTYPES | {torch.bool: 3, torch.float64: 4}
_VARIANTS = ("avx512", "avx2", "baseline")
"""Widest first."""
OCTAVES = 4
"""Doublings of the scale that one run computes at most, native.cpp's MAX_OCTAVES."""
_LAYOUT = struct.Struct("=7q3d3q42q8q10q4q2q")
_MOMENTS = struct.Struct("=7q12q12q")
# Said, because what torch.empty makes otherwise is for the user to set.
_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_NOTHING, _NO_MASK, _FORWARD_ONLY = (0,) * 6, (0,) * 25, (0,) * 16


_OTHER_VERSION = "its library is of another version: install scaledot again"


class _Missing(Exception):
    pass


@cache
def _library() -> ctypes.CDLL | str:
    """The variant for this processor, or the one that SCALEDOT_ISA names; or why there is none."""
    try:
        return _load()
    except _Missing as reason:
        return str(reason)


def _load() -> ctypes.CDLL:
    folder = Path(__file__).parent
    wanted = os.environ.get("SCALEDOT_ISA", "")
    if wanted and wanted not in _VARIANTS:
        raise _Missing(f"SCALEDOT_ISA is {wanted!r}: pass one of {', '.join(_VARIANTS)}")
    found = {v: path for v in _VARIANTS if (path := folder / f"native_{v}.so").exists()}
    if "baseline" not in found:
        raise _Missing("it was not compiled: no C++ compiler was found when scaledot was installed")
    try:
        library = _open(found["baseline"])
        runs = [v for v in found if library.scaledot_supports(v.encode())]
        if wanted and wanted not in runs:
            raise _Missing(f"SCALEDOT_ISA is {wanted!r}: this processor or build has none")
        library = _open(found[wanted or runs[0]])
    except OSError as error:
        raise _Missing(f"its library does not load: {error}") from None
    except AttributeError:
        raise _Missing(_OTHER_VERSION) from None
    sizes = library.scaledot_problem_size(), library.scaledot_moments_size()
    if sizes != (_LAYOUT.size, _MOMENTS.size):
        raise _Missing(_OTHER_VERSION)
    pool = _torch_pool()
    if pool:
        library.scaledot_use_pool(pool)
    return library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.scaledot_isa.restype = ctypes.c_char_p
    for name in ("scaledot_problem_size", "scaledot_moments_size", "scaledot_supports"):
        getattr(library, name).restype = ctypes.c_int64
    library.scaledot_supports.argtypes = [ctypes.c_char_p]
    library.scaledot_use_pool.argtypes = [ctypes.c_void_p]
    for name in ("scaledot_forward", "scaledot_backward", "scaledot_moments"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], None
    return library


def _torch_pool() -> int | None:
    """The address of torch's parallel loop, so that its threads serve and none are added."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                function = ctypes.CDLL(str(path)).torch_parallel_for
            except (OSError, AttributeError):
                return None
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def available() -> str | None:
    """None where the kernel can be used, else the reason in one line."""
    library = _library()
    return library if isinstance(library, str) else None


def reason(device: str, dtype: torch.dtype, dropout: bool) -> str | None:
    """Why this kernel cannot compute such a problem, in one line; None where it can."""
    if (missing := available()) is not None:
        return f"kernel 'native' is not there: {missing}"
    if device != "cpu":
        return f'kernel \'native\' runs on a CPU, not on {device}: pass kernel="tiled" or "auto"'
    if dtype not in DTYPES:
        return (
            f"kernel 'native' takes float32, bfloat16 and float16, not {dtype}: "
            'pass kernel="tiled" or "auto"'
        )
    if dropout:
        return 'kernel \'native\' has no dropout: pass kernel="tiled" or "auto"'
    return None


def info() -> dict[str, str]:
    """Which variant is loaded and whose threads it uses. Only where `available()` is None."""
    pool = "torch's" if _torch_pool() else "its own"
    return {"isa": _loaded().scaledot_isa().decode(), "threads": pool}


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert not isinstance(library, str), library
    return library


def output(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    seen: Visibility,
    terms: Terms,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """The output of `forward` alone."""
    out = torch.empty((*query.shape[:3], value.shape[3]), **_FLOAT)
    rows = math.prod(query.shape[:3])
    # What a row is summed up in while it is computed, floats, integers and a flag: nobody looks.
    scratch = torch.empty((FLOATS + 2) * rows + (rows + 3) // 4, **_FLOAT)
    start = scratch.data_ptr()
    addresses = (start, start + 4 * FLOATS * rows, start + 4 * (FLOATS + 2) * rows)
    _run(query, key, value, seen, terms, out, addresses, statistics=0)
    return out


def forward(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"] | None,
    seen: Visibility,
    terms: Terms,
    *,
    statistics: bool = True,
) -> tuple[
    Float[Tensor, "batch heads queries value_dim"] | None,
    RowStats,
    Float[Tensor, "batch heads queries"],
    Float[Tensor, "batch heads queries"],
]:
    """(output, row statistics, top, log_mass) as `tiled.forward`; output is float32.

    Without `statistics`, only visible, lse and nonfinite of the rows are defined.
    Raises: ValueError for dropout and for a dtype other than float32, bfloat16 and float16.
    """
    numbers, whole, nonfinite = _results(query.shape[:3])
    out = None if value is None else torch.empty((*query.shape[:3], value.shape[3]), **_FLOAT)
    addresses = (numbers.data_ptr(), whole.data_ptr(), nonfinite.data_ptr())
    _run(query, key, value, seen, terms, out, addresses, statistics=int(statistics))
    return out, *_rows(numbers, whole, nonfinite, terms)


def sweep(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    seen: Visibility,
    terms: Terms,
    factors: Sequence[float],
    value: Float[Tensor, "batch kv_heads keys value_dim"] | None = None,
) -> tuple[list[RowStats], Float[Tensor, "batch heads queries value_dim"] | None]:
    """(rows at scale·factor for each factor, softmax(…)·value at the scale itself).

    Factors an octave apart share one QKᵀ and one exponential: e^(2βz) is the square of e^(βz); and
    the output shares it with what starts at factor 1. With a soft-cap or an additive mask, which do
    not grow with the scale, each factor is a run.
    """
    done: dict[float, RowStats] = {}
    together = terms.softcap is None and seen.bias is None
    out = None
    if value is not None:
        out = torch.empty((*query.shape[:3], value.shape[3]), **_FLOAT)
    # From 1 up first where a value wants it, so that no run from below takes 1 in.
    order = sorted(factors, key=abs)
    if value is not None:
        order = [1.0, *(f for f in order if f != 1)]
    for factor in order:
        if factor in done:
            continue
        wanted = (n for n in range(1, OCTAVES + 1) if factor * 2**n in factors)
        octaves = max((n for n in wanted if factor * 2**n not in done), default=0)
        octaves = octaves if together and factor else 0
        numbers, whole, nonfinite = _results(query.shape[:3], (octaves + 1,))
        addresses = (numbers.data_ptr(), whole.data_ptr(), nonfinite.data_ptr())
        scaled = replace(terms, scale=terms.scale * factor)
        here = (value, out) if factor == 1 else (None, None)
        _run(query, key, here[0], seen, scaled, here[1], addresses, statistics=1, octaves=octaves)
        for n in range(octaves + 1):
            done[factor * 2**n] = _rows(numbers[n], whole[n], nonfinite[n], terms)[0]
    return [done[factor] for factor in factors], out


def _results(shape: torch.Size, times: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Room for native.cpp's statistics of every row: floats, integers and flags."""
    return (
        torch.empty((*times, FLOATS, *shape), **_FLOAT),
        torch.empty((*times, 2, *shape), dtype=torch.int32, device="cpu"),
        torch.empty((*times, *shape), dtype=torch.bool, device="cpu"),
    )


def _rows(
    numbers: Tensor, whole: Tensor, nonfinite: Tensor, terms: Terms
) -> tuple[RowStats, Tensor, Tensor]:
    """(row statistics, top, log_mass), views of what native.cpp wrote."""
    (mean, variance, largest, lse, entropy, margin, collision, jacobian, mean_key, sink_mass, top,
     log_mass) = numbers.unbind()  # fmt: skip
    visible, top_key = whole.unbind()
    rows = RowStats(
        visible, mean, variance, largest, lse, entropy, top_key, margin, collision, jacobian,
        mean_key, nonfinite, None if terms.sinks is None else sink_mass, "native",
    )  # fmt: skip
    return rows, top, log_mass


def _run(
    query: Tensor, key: Tensor, value: Tensor | None, seen: Visibility, terms: Terms,
    out: Tensor | None, addresses: tuple[int, int, int], *, statistics: int, octaves: int = 0,
) -> None:  # fmt: skip
    """Compute into `out` and what lies at the addresses of `_results`."""
    problem, _kept = _problem(
        query, key, value, seen, terms, out, (*addresses, statistics, octaves), _FORWARD_ONLY
    )
    if 0 not in query.shape:
        _loaded().scaledot_forward(problem)


def backward(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    seen: Visibility,
    terms: Terms,
    top: Float[Tensor, "batch heads queries"],
    log_mass: Float[Tensor, "batch heads queries"],
    entropy: Float[Tensor, "batch heads queries"],
    counted: Tensor,
    out: Float[Tensor, "batch heads queries value_dim"],
    d_out: Float[Tensor, "batch heads queries value_dim"] | None,
    d_lse: Float[Tensor, "batch heads queries"] | None,
    d_entropy: Float[Tensor, "batch heads queries"] | None,
    bias_gradient: bool,
    rows: bool = False,
) -> Gradients:
    """Exact gradients in float32, as `tiled.backward`; the same for a given number of threads.

    Source: docs/maths.md#backward.
    """
    d_query = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    d_key, d_value = (
        torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
        for x in (key, value)
    )
    d_bias = None
    if bias_gradient and seen.bias is not None:
        d_bias = torch.zeros_like(seen.bias, dtype=torch.float32)

    d_out = torch.zeros_like(out) if d_out is None else d_out.to(torch.float32).contiguous()
    top, log_mass, counted = top.contiguous(), log_mass.contiguous(), counted.contiguous()
    folded = fold(terms, top, log_mass, entropy, counted, out, d_out, d_lse, d_entropy)
    level, d_entropy = folded.level.contiguous(), folded.d_entropy
    d_entropy = None if d_entropy is None else d_entropy.contiguous()
    constants = sums = None
    if rows:
        constants = row_constants(folded, log_mass, d_out)
        sums = torch.zeros(len(SUMS), *top.shape, **_FLOAT)
    if d_query.numel() and key.shape[2]:
        read = (d_out, level, d_entropy, top, log_mass, counted)
        written = (d_query, d_key, d_value, d_bias)
        addresses = (0 if x is None else x.data_ptr() for x in (*read, *written))
        strides = (0,) * 4 if d_bias is None else _array(d_bias)[2:]
        asked = (0 if x is None else x.data_ptr() for x in (constants, sums))
        problem, _kept = _problem(
            query, key, value, seen, terms, None, (0,) * 5, (*addresses, *strides, *asked)
        )
        _loaded().scaledot_backward(problem)
    else:
        d_query.zero_()
    passed = None
    if sums is not None and constants is not None:
        passed = row_gradients(sums, constants, folded, log_mass, counted)
    return Gradients(d_query, d_key, d_value, d_bias, folded.d_sinks, passed)


def _problem(
    query: Tensor, key: Tensor, value: Tensor | None, seen: Visibility, terms: Terms,
    out: Tensor | None, results: tuple[int, ...], backward: tuple[int, ...],
) -> tuple[bytes, tuple[Tensor | None, ...]]:  # fmt: skip
    """native.cpp's `Problem`, and the tensors that must live as long as it is used."""
    if terms.dropout_p or query.dtype not in DTYPES:
        raise ValueError(reason("cpu", query.dtype, terms.dropout_p > 0))
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    left, right = seen.left, seen.right
    head = (
        batch, heads, kv_heads, queries, keys, dim, 0 if value is None else value.shape[3],
        terms.scale, terms.softcap or 0.0,
        -math.inf if seen.bias is None else torch.finfo(seen.bias.dtype).min / 2,
        seen.offset, -1 if left is None else left, -1 if right is None else right,
        query.data_ptr(), DTYPES[query.dtype], *query.stride(),
        key.data_ptr(), DTYPES[key.dtype], *key.stride(),
    )  # fmt: skip
    values = _NOTHING if value is None else (value.data_ptr(), DTYPES[value.dtype], *value.stride())
    tail = (
        0 if out is None else out.data_ptr(), *results, torch.get_num_threads(), *backward,
    )  # fmt: skip
    dense = seen.allowed if seen.bias is None else seen.bias
    if seen.keep is None and seen.segments is None and dense is None and terms.sinks is None:
        return _LAYOUT.pack(*head, *values, *_NO_MASK, *tail), ()
    keep = None if seen.keep is None else seen.keep.contiguous()
    query_ids, key_ids = (None, None) if seen.segments is None else _small_ids(*seen.segments)
    sinks = None if terms.sinks is None else terms.sinks.detach().to(torch.float32).contiguous()
    numbers = _LAYOUT.pack(
        *head, *values, *_per_key(keep), *_per_key(query_ids), *_per_key(key_ids), *_array(dense),
        0 if sinks is None else sinks.data_ptr(), *tail,
    )  # fmt: skip
    return numbers, (keep, query_ids, key_ids, dense, sinks)


def _array(x: Tensor | None) -> tuple[int, ...]:
    """An `Array`: address, dtype, strides; 0 along an axis that is broadcast."""
    if x is None:
        return (0,) * 6
    return (
        x.data_ptr(), _MASK_DTYPES[x.dtype],
        *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)),
    )  # fmt: skip


def _per_key(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return (0,) * 6
    return (
        x.data_ptr(),
        5 if x.dtype == torch.int32 else 3,
        0 if x.shape[0] == 1 else x.shape[1],
        0,
        0,
        1,
    )


def _small_ids(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Document ids as contiguous int32, renumbered where they do not fit."""
    limit = torch.iinfo(torch.int32)
    if any(x.dtype == torch.int64 and x.numel() and (x.max() > limit.max or x.min() < limit.min)
           for x in (query_ids, key_ids)):  # fmt: skip
        both = torch.cat([query_ids.flatten(), key_ids.flatten()]).unique(return_inverse=True)[1]
        query_ids, key_ids = (
            part.reshape(x.shape) for part, x in
            zip(both.split([query_ids.numel(), key_ids.numel()]), (query_ids, key_ids), strict=True)
        )  # fmt: skip
    return query_ids.to(torch.int32).contiguous(), key_ids.to(torch.int32).contiguous()


def moments_reason(device: str) -> str | None:
    """Why there are no moments of keys on such a device, in one line; None where there are."""
    if (missing := available()) is not None:
        return f"kernel 'native' is not there: {missing}"
    if device != "cpu":
        return f'kernel \'native\' runs on a CPU, not on {device}: pass kernel="tiled" or "auto"'
    return None


def moments(
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    source: Int[Tensor, " keys"] | None,
    runs: Int[Tensor, " keys"] | None,
    start: Int[Tensor, " queries"],
    stop: Int[Tensor, " queries"],
    weight: Bool[Tensor, "batch kv_heads keys"] | None,
    toward: Float[Tensor, "batch heads dim"],
) -> tuple[Float[Tensor, "batch heads queries"], ...]:
    """(mean, m2, bias_mean, bias_m2), float64, of each row's raw scores over keys start … stop−1.

    Keys are taken in the order of `source` (None: theirs), and so are runs and weight; start is
    where a run of keys starts, runs where each key's does (None: they are one). weight is False for
    keys to leave out, m2 the sum of squared deviations. bias_mean and bias_m2 are those of the
    query `toward` along the same keys. 0 for a row without keys. Any float dtype; all is computed
    in float64. Only where `moments_reason` is None. Source: docs/maths.md#score-moments.
    """
    out = torch.empty((4, *query.shape[:3]), dtype=torch.float64, device="cpu")
    if query.numel() == 0 or key.numel() == 0:
        return out.zero_().unbind()
    rows = None
    if (stop[1:] < stop[:-1]).any():
        rows = stop.argsort(stable=True)
    toward = toward.to(torch.float64).contiguous()
    _moments(query, key, source, runs, start, stop, rows, weight, toward, *out.unbind(), None)
    return out.unbind()


def scatter(
    x: Float[Tensor, "batch heads length dim"], weight: Bool[Tensor, "batch heads length"] | None
) -> tuple[Tensor, Float[Tensor, "batch heads dim"], Float[Tensor, "batch heads dim dim"]]:
    """(number, mean, Σ(x − mean)(x − mean)ᵀ) of the vectors that weight does not leave out."""
    batch, heads, _, d = x.shape
    state = torch.zeros((batch, heads, 1 + d + d * d), dtype=torch.float64, device="cpu")
    if x.numel():
        _moments(x[:, :, :0], x, None, None, None, None, None, weight, *(None,) * 5, state)
    return state[..., 0], state[..., 1 : 1 + d], state[..., 1 + d :].unflatten(-1, (d, d))


def _moments(query: Tensor, key: Tensor, *tensors: Tensor | None) -> None:
    """Run native.cpp's `moments` on tensors in the order of its struct."""
    batch, heads, queries, dim = query.shape
    kept = [None if x is None else x.contiguous() for x in tensors]
    packed = _MOMENTS.pack(
        batch, heads, key.shape[1], queries, key.shape[2], dim, torch.get_num_threads(),
        query.data_ptr(), _MASK_DTYPES[query.dtype], *query.stride(),
        key.data_ptr(), _MASK_DTYPES[key.dtype], *key.stride(),
        *(0 if x is None else x.data_ptr() for x in kept),
    )  # fmt: skip
    _loaded().scaledot_moments(packed)
