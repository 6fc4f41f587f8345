"""Which GPU: one that is not there is refused with those that are."""

from __future__ import annotations

import pytest
import torch

from graftlm.core.errors import ConfigError
from graftlm.core.model.weights import choose_device


@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"'cuda:{count}', torch sees {count} GPU\(s\) here; use 'cuda:0'"):
        choose_device(f"cuda:{count}")
    assert choose_device("auto").type == "cuda"
    assert choose_device("cuda:0") == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_that_is_asked_for_is_refused_with_the_remedy() -> None:
    built = ", and this torch was built without CUDA" if torch.version.cuda is None else ""
    with pytest.raises(ConfigError, match=rf"device is 'cuda', but torch sees no GPU here{built}; use device='cpu'"):
        choose_device("cuda")
    assert choose_device("auto") == torch.device("cpu")
