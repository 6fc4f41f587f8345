"""PictureOptions: the size of pictures, as `mm_processor_kwargs` of a runtime, a request or a picture give it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from graftlm.core.errors import ConfigError, shortened

_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Options of Qwen's image processor, and the fields of `size` that hold them: later versions take `size` alone."""

_SIZES = frozenset(
    {"size", "max_soft_tokens", "crop_to_patches", "min_patches", "max_patches", "do_image_splitting", *_PIXELS}
    | {"do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size"}
    | {"pan_and_scan_min_ratio_to_activate"}
)
"""Arguments of transformers' image processors that choose the size of a picture. Others belong to the weights."""


class PictureOptions:
    """The options of every picture, and those of a request beside them, for one image processor of transformers.

    of_runtime  for `images_kwargs` of the processor

    Raises: ConfigError for an option that the image processor does not have, and for another kind of value.
    """

    def __init__(self, image_processor: Any, given: Mapping[str, Any]) -> None:
        self._processor = image_processor
        self._own_size = _fields(getattr(image_processor, "size", None) or {})
        self._known = _names(image_processor) & _SIZES
        if "longest_edge" not in self._own_size:  # height and width belong to the encoder
            self._known -= {"size", *_PIXELS}
        self.of_runtime: dict[str, Any] = {}
        self.of_runtime = self._read(given)

    def of_request(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a picture. Raises ConfigError for a number above that of the runtime.

        The memory of the runtime's largest picture is reserved, and a client must not enlarge it.
        """
        read = self._read(given)
        for name, value in read.items():
            own = self.of_runtime.get(name, getattr(self._processor, name, None))
            most = max(_fields(own or 0).values())
            for field, number in _fields(value).items():
                if number > most:
                    raise ConfigError(
                        f"mm_processor_kwargs make {_place(name, field)} {number:,} in a request, and the runtime's "
                        f"is {most:,}; give at most that, or set mm_processor_kwargs of the runtime"
                    )
        return {**self.of_runtime, **read}

    def _read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise ConfigError(f"mm_processor_kwargs is {shortened(given)}; give an object such as {{'max_pixels': N}}")
        for name, value in given.items():
            if name not in self._known:
                known = ", ".join(sorted(self._known)) or "none"
                raise ConfigError(
                    f"mm_processor_kwargs.{name} is no option of this model's pictures "
                    f"({type(self._processor).__name__}); known: {known}"
                )
            for field, number in self._checked(name, value).items():
                if number is not False and not 0 < number < 2**31:
                    raise ConfigError(
                        f"mm_processor_kwargs make {_place(name, field)} {shortened(number)}; give a number above 0"
                    )
        read = dict(given)
        pixels = {field: read.pop(name) for name, field in _PIXELS.items() if name in read}
        if pixels:
            read["size"] = {**self._own_size, **self.of_runtime.get("size", {}), **read.get("size", {}), **pixels}
        size = read.get("size", {})
        if size.get("shortest_edge", 0) > size.get("longest_edge", 2**31):
            raise ConfigError(
                f"mm_processor_kwargs make the smallest size {size['shortest_edge']:,} and the largest "
                f"{size['longest_edge']:,}; give both, the smallest below the largest"
            )
        return read

    def _checked(self, name: str, value: Any) -> dict[str, float]:
        """Return the numbers of an option by field. Raises ConfigError for another kind of value."""
        if name == "size":
            if not isinstance(value, Mapping) or set(value) != set(self._own_size):
                raise ConfigError(
                    f"mm_processor_kwargs.size is {shortened(value)}; give an object of {', '.join(self._own_size)}"
                )
            numbers = dict(value)
        else:
            numbers = {"": value}
        switch = isinstance(getattr(self._processor, name, None), bool) or name.startswith(("do_", "crop_to"))
        for field, number in numbers.items():
            whole = name != "pan_and_scan_min_ratio_to_activate"
            if isinstance(number, bool) is not switch or not isinstance(number, int if whole else int | float):
                kind = "true or false" if switch else "a whole number" if whole else "a number"
                raise ConfigError(f"mm_processor_kwargs make {_place(name, field)} {shortened(number)}; give {kind}")
        return numbers


def _place(name: str, field: str) -> str:
    return f"{name}.{field}" if field else name


def _fields(value: Any) -> dict[str, Any]:
    """Return the numbers of a size, which transformers writes as a mapping or a SizeDict; of a number, itself."""
    if isinstance(value, int | float):
        return {"": value}
    return {name: number for name, number in dict(value).items() if number is not None}


def _names(image_processor: Any) -> frozenset[str]:
    """Return the names of the arguments of an image processor."""
    kwargs = getattr(image_processor, "valid_kwargs", None)
    if kwargs is not None:
        return frozenset(kwargs.__annotations__)
    return frozenset(inspect.signature(image_processor.preprocess).parameters)
