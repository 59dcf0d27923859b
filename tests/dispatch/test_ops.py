"""The toolkit's own ops, called by themselves."""

from __future__ import annotations

import pytest
import torch

from loka_toolkit.dispatch.counters import Bank, Outcome, Slot
from loka_toolkit.dispatch.runtime import gemm, missed_linear, missed_mm
from loka_toolkit.kernels.catalog import find_candidate


def test_ops_pass_opcheck():
    candidate = find_candidate("torch.scaled_mm/e4m3/tensorwise/fp32")
    static = find_candidate("torch.scaled_mm/e4m3/static/fp32")
    bank = Bank([Slot(candidate, None, None), Slot(static, 0.1, 0.1)], torch.device("cpu"))
    scale = torch.tensor(0.01)
    a, b = torch.randn(13, 39), torch.randn(39, 26)
    torch.library.opcheck(gemm, (a, b, None, None, torch.float32, bank.id, 0))
    torch.library.opcheck(
        gemm, (a, b.t().contiguous().t(), scale, scale, torch.bfloat16, bank.id, 1)
    )
    x, w = torch.randn(2, 13, 39), torch.randn(26, 39)
    shape = int(Outcome.SHAPE)
    torch.library.opcheck(missed_linear, (x, w, torch.randn(26), bank.id, 0, shape))
    torch.library.opcheck(missed_linear, (x.transpose(0, 1), w, None, bank.id, 0, shape))
    torch.library.opcheck(missed_mm, (a, b, bank.id, 0, shape))
    assert bank.totals()[0][Outcome.HIT] > 0 and bank.totals()[0][Outcome.SHAPE] > 0


def test_the_output_dtype_is_an_argument_even_under_autocast():
    candidate = find_candidate("torch.scaled_mm/e4m3/tensorwise/fp32")
    bank = Bank([Slot(candidate, None, None)], torch.device("cpu"))
    a, b = torch.randn(13, 39), torch.randn(39, 26)
    with torch.autocast("cpu", torch.bfloat16):
        assert gemm(a, b, None, None, torch.float32, bank.id, 0).dtype is torch.float32
        assert missed_mm(a, b, bank.id, 0, int(Outcome.ENV)).dtype is torch.float32
        assert missed_linear(a, b.t(), None, bank.id, 0, 1).dtype is torch.float32


def test_a_graph_of_a_gone_installation_says_so():
    candidate = find_candidate("torch.scaled_mm/e4m3/tensorwise/fp32")
    gone = Bank([Slot(candidate, None, None)], torch.device("cpu")).id
    a = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="compile the model again"):
        gemm(a, a, None, None, torch.float32, gone, 0)
