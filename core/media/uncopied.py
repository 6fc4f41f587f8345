"""Large pictures for processors that compute with Pillow: resized as they were decoded.

transformers' part for pictures without torchvision copies all pixels into an array [3, height, width], and makes
another picture of it to resize that: 330 MB of 33 million pixels, beside the 130 MB of the decoded picture. Here
`process_image` returns a stand-in for the array, which `resize` takes as it is, with the same result.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np

from graftlm.core.media.pixels import import_pillow


def without_copies(image_processor: Any) -> Any:
    """Return a copy of an image processor that takes pictures uncopied; the same one if it does not use Pillow."""
    kind: Any = type(image_processor)
    if getattr(image_processor, "backend", "") != "pil" or not hasattr(kind, "process_image"):
        return image_processor
    own = copy.copy(image_processor)
    own.__class__ = _uncopied(kind)
    return own


@functools.cache
def _uncopied(kind: Any) -> Any:
    def process_image(self: Any, image: Any, *args: Any, **options: Any) -> Any:
        if getattr(image, "mode", None) != "RGB":
            return kind.process_image(self, image, *args, **options)
        return _stand_in()(image)

    return type(kind.__name__, (kind,), {"process_image": process_image, "__module__": kind.__module__})


@functools.cache
def _stand_in() -> Any:
    image_class: Any = import_pillow().Image

    class StandIn(image_class):  # type: ignore[misc]
        """Stands for the array [3, height, width] of a picture, and becomes it where it is read as an array.

        transformers resizes pictures as such, but takes their `size` for height and width. It has no pixels of its
        own: what else a picture can do fails.
        """

        ndim = 3
        size = property(lambda self: self.shape[1:])

        def __init__(self, picture: Any) -> None:
            super().__init__()
            self._picture = picture
            self.shape = (3, picture.height, picture.width)

        def resize(self, size: Any, **options: Any) -> Any:
            return self._picture.resize(size, **options)

        @property
        def __array_interface__(self) -> dict[str, Any]:
            pixels = np.asarray(self._picture).transpose(2, 0, 1).tobytes()
            return {"version": 3, "shape": self.shape, "typestr": "|u1", "data": pixels}

    return StandIn
