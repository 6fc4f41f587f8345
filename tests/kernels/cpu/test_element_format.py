"""Formats of elements in the CPU loops."""

import pytest
import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.element_format import ElementFormat


@pytest.mark.parametrize("element", ElementFormat)
def test_a_format_is_that_of_the_torch_dtype_of_its_name(element: ElementFormat) -> None:
    dtype = getattr(torch, element.name.lower())
    assert ElementFormat.of(dtype) is ElementFormat.of(element.name.lower()) is element
    assert (element.size, element.interleaved) == (dtype.itemsize, 4 // dtype.itemsize)
    assert element.panel_bytes(10) == torch.empty(10, PANEL, dtype=dtype).nbytes


def test_no_loop_reads_float16() -> None:
    with pytest.raises(KeyError, match="FLOAT16"):
        ElementFormat.of(torch.float16)


def test_a_format_is_a_number_in_names_and_programs() -> None:
    assert repr(("norm", (ElementFormat.BFLOAT16,))) == "('norm', (1,))"
