"""Candidates that misbehave, each in one way; the worker imports this file by name."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.kernels.contract import Candidate, Chip, Prepared, Problem, Side
from loka_toolkit.kernels.torch_matmul import TorchMatmul
from loka_toolkit.kernels.torch_scaled_mm import TorchScaledMM
from loka_toolkit.numerics.recipes import parse_recipe

CALLS_FILE = "LOKA_TEST_CALLS"
GOOD = TorchScaledMM(parse_recipe("e4m3/tensorwise/fp32"))

Run = Callable[[Prepared, Prepared, torch.dtype], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Fake:
    """The right kernel, but for what is overridden."""

    name: str
    run_instead: Run = GOOD.run
    prepare_instead: Callable[..., Prepared] = GOOD.prepare
    refusal: str | None = None
    installed: str | None = "1.0"
    recipe: str = "e4m3/tensorwise/fp32"
    library: str = "fake"
    roles: frozenset[Role] = frozenset(Role)
    emulated: bool = False
    abi: int = 1
    operator: str = "fake"

    def version(self) -> str | None:
        return self.installed

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        return self.refusal

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        return self.prepare_instead(operand, side, scale)

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        file = os.environ.get(CALLS_FILE)
        if file:
            with Path(file).open("a") as handle:
                handle.write(f"{self.name}\n")
        return self.run_instead(a, b, out_dtype)


def product(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    return GOOD.run(a, b, out_dtype)


def _raise(error: BaseException) -> Run:
    def run(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        raise error

    return run


def _one_nan(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    out = product(a, b, out_dtype)
    out[-1, -1] = torch.nan
    return out


def _transposed(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    return product(a, b, out_dtype).mT.contiguous()


def _garbage(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    out = product(a, b, out_dtype)
    generator = torch.Generator().manual_seed(0)
    return out.std() * torch.randn(out.shape, generator=generator).to(out_dtype)


def _unwritten_tile(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    whole = product(a, b, out_dtype)
    out = torch.empty_like(whole)
    out[:, :-1] = whole[:, :-1]
    out[:-1, -1] = whole[:-1, -1]
    return out


def _lost_k_tile(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    lost = dataclasses.replace(a, data=a.data.clone())
    lost.data.view(torch.uint8)[:, :16] = 0
    return product(lost, b, out_dtype)


def _zeroed_rows(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    out = product(a, b, out_dtype)
    out[16:32] = out[:16]
    return out


def _scale_ignored(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    assert a.scale is not None
    return product(dataclasses.replace(a, scale=torch.ones_like(a.scale)), b, out_dtype)


_parity = [0]


def _racing(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    out = product(a, b, out_dtype)
    _parity[0] += 1
    if _parity[0] % 3 == 0:
        out[0, 0] += out.abs().max() * 1e-3
    return out


def _hang(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    time.sleep(600)
    raise AssertionError("unreachable")


def _segfault(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def _exit(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    print("a library's last words")
    os._exit(3)


def _cast_to_e5m2(operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None) -> Prepared:
    return TorchScaledMM(parse_recipe("e5m2/tensorwise/fp32")).prepare(operand, side)


def _hides_nan(operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None) -> Prepared:
    return GOOD.prepare(operand.nan_to_num(0.0), side, scale)


class _CompilationError(Exception):
    """Stands for triton.compiler.errors.CompilationError, which is recognized by its module."""


_CompilationError.__module__ = "triton.compiler.errors"

BEHAVIORS: tuple[Fake, ...] = (
    Fake("good"),
    Fake("absent", installed=None),
    Fake("picky", refusal="K = 13 is no multiple of 16"),
    Fake("forward-only", roles=frozenset({Role.FWD})),
    Fake("raises", run_instead=_raise(ValueError("bad tile\nsecond line"))),
    Fake("exits", run_instead=_raise(SystemExit(7))),
    Fake("no-memory", run_instead=_raise(torch.OutOfMemoryError("CUDA out of memory."))),
    Fake(
        "no-host-memory",
        run_instead=_raise(RuntimeError("DefaultCPUAllocator: can't allocate memory: x")),
    ),
    Fake("no-compiler", run_instead=_raise(_CompilationError("at 3:4: no such op"))),
    Fake("nan", run_instead=_one_nan),
    Fake("transposed", run_instead=_transposed),
    Fake("garbage", run_instead=_garbage),
    Fake("unwritten", run_instead=_unwritten_tile),
    Fake("lost-k-tile", run_instead=_lost_k_tile),
    Fake("stale-tile", run_instead=_zeroed_rows),
    Fake("unscaled", run_instead=_scale_ignored),
    Fake("racing", run_instead=_racing),
    Fake("wrong-format", prepare_instead=_cast_to_e5m2),
    Fake("wrong-dtype", run_instead=lambda a, b, out: product(a, b, torch.bfloat16)),
    Fake("hides-nan", prepare_instead=_hides_nan),
)

DEADLY: tuple[Fake, ...] = (
    Fake("good"),
    Fake("hangs", run_instead=_hang),
    Fake("segfaults", run_instead=_segfault),
    Fake("leaves", run_instead=_exit),
    Fake("good-after"),
)


def catalog() -> tuple[Candidate, ...]:
    return BEHAVIORS


def deadly_catalog() -> tuple[Candidate, ...]:
    return DEADLY


def good_catalog() -> tuple[Candidate, ...]:
    return Fake("good"), Fake("good-too"), Fake("nan", run_instead=_one_nan)


def newer_catalog() -> tuple[Candidate, ...]:
    return Fake("good", installed="2.0"), Fake("good-too"), Fake("nan", run_instead=_one_nan)


def interrupting_catalog() -> tuple[Candidate, ...]:
    return (
        Fake("good"),
        Fake("good-too", run_instead=_raise(KeyboardInterrupt())),
        Fake("nan", run_instead=_one_nan),
    )


def _too_big(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2**45, dtype=torch.uint8, device=a.data.device).to(out_dtype)


def _device_assert(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
    beyond = torch.full((1,), 10**6, device=a.data.device)
    return a.data.to(torch.float32)[beyond]


def cuda_catalog() -> tuple[Candidate, ...]:
    """Products in bf16, so that any CUDA GPU takes part."""
    bf16 = TorchMatmul("bf16")
    options = {"recipe": "bf16", "prepare_instead": bf16.prepare}
    return (
        Fake("good", run_instead=bf16.run, **options),
        Fake("too-big", run_instead=_too_big, **options),
        Fake("asserts", run_instead=_device_assert, **options),
        Fake("good-after", run_instead=bf16.run, **options),
    )
