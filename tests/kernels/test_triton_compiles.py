"""The kernels compiled for GPUs that are not here: that they compile, and what to.

What the docstrings say of instructions is read from the assembly; whether it is right when it runs
only a GPU can tell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loka_toolkit.kernels.triton_bits import Encoding
from loka_toolkit.kernels.triton_cast import interpreted
from loka_toolkit.kernels.triton_cast_kernels import cast_lines, cast_tiles
from loka_toolkit.kernels.triton_gemm import _TILES, Tile, _product
from loka_toolkit.numerics.formats import E4M3, E5M2, FloatFormat

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter compiles nothing")

CODES = {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, warps: int
) -> Any:
    """Compile as a launch would whose sizes and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants
    }
    source = ASTSource(
        kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned
    )
    options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def product(formats: tuple[FloatFormat, FloatFormat], tile: Tile, promoted: bool, cap: int) -> Any:
    constants: dict[str, Any] = {
        "DECODED": False,
        "PROMOTED": promoted,
        "STEPS": -1,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": 8,
        "a_k": 1,
        "b_k": 1,
    }
    for side, fmt in zip("AB", formats, strict=True):
        encoding = Encoding.of(fmt)
        constants[f"EXPONENT_{side}"] = encoding.exponent_bits
        constants[f"MANTISSA_{side}"] = encoding.mantissa_bits
        constants[f"BIAS_{side}"] = encoding.bias
        constants[f"SPECIALS_{side}"] = encoding.specials
    types = {"a": CODES[formats[0]], "b": CODES[formats[1]], "out": "*bf16"}
    types |= {"scale_a": "*fp32", "scale_b": "*fp32"}
    return compiled(_product, types, constants, cap, tile.warps)


@pytest.mark.parametrize("promoted", [False, True])
def test_hopper_multiplies_fp8_and_promotes_only_when_asked(promoted: bool) -> None:
    tile = _TILES[1]
    found = product((E5M2, E4M3), tile, promoted, 90)
    assembly = found.asm["ptx"]
    instructions = set(re.findall(r"wgmma\.mma_async\.\S+", assembly))
    assert instructions == {"wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3"}
    additions = len(re.findall(r"\badd(?:\.rn)?\.f32", assembly))
    per_thread = tile.m * tile.n // (tile.warps * 32)
    assert additions == (per_thread if promoted else 0)


def test_other_chips_do_not_promote_which_is_why_they_are_refused() -> None:
    ada = product((E4M3, E4M3), _TILES[3], True, 89).asm["ptx"]
    assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in ada
    assert not re.findall(r"\badd(?:\.rn)?\.f32", ada)


@pytest.mark.parametrize("tile", _TILES, ids=str)
def test_every_tile_fits_the_shared_memory_of_a_hopper(tile: Tile) -> None:
    """227 KiB per block; the cubin is there, so registers were found too."""
    found = product((E4M3, E4M3), tile, False, 90)
    assert found.metadata.shared <= 227 * 1024
    assert found.asm["cubin"]


@pytest.mark.parametrize("capability", [80, 90])
def test_casts_divide_rightly_and_move_16_bytes_at_a_time(capability: int) -> None:
    """On chips without FP8 too: nothing converts to it."""
    encoding = Encoding.of(E4M3)
    constants: dict[str, Any] = {
        "EXPONENT_BITS": encoding.exponent_bits,
        "MANTISSA_BITS": encoding.mantissa_bits,
        "BIAS": encoding.bias,
        "SPECIALS": encoding.specials,
        "PER_MAX_BITS": encoding.per_max_bits,
        "x_k": 1,
    }
    tiles = compiled(
        cast_tiles,
        {"x": "*i16", "known": "*i32", "scales": "*fp32", "first": "*u8", "second": "*u8"},
        constants
        | {
            "FROM_AMAX": True,
            "WRITE_FIRST": True,
            "WRITE_SECOND": True,
            "BLOCK_L": 32,
            "BLOCK_K": 256,
            "first_k": 1,
            "second_l": 1,
        },
        capability,
        8,
    )
    lines = compiled(
        cast_lines,
        {"x": "*i16", "out": "*u8", "scales": "*fp32"},
        constants | {"BLOCK_L": 4, "BLOCK_K": 1024, "out_k": 1},
        capability,
        8,
    )
    for kernel in (tiles, lines):
        assembly = kernel.asm["ptx"]
        assert "div.rn.f32" in assembly
        assert not re.findall(r"div\.(full|approx)\S*", assembly)
        assert "ld.global.v4.b32" in assembly and "st.global.b8" not in assembly
        assert "e4m3" not in assembly
