"""Types that recur among options. An error message reads the bounds back, so it always names the true range."""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from titanlite.config.loader import OWN_MESSAGE


def _path(text: str) -> str:
    if len(os.fsencode(text)) > 4095 or any(len(os.fsencode(name)) > 255 for name in text.split("/")):
        raise PydanticCustomError(OWN_MESSAGE, "expected a path of at most 4,095 bytes, each name at most 255")
    return text


PathText = Annotated[str, AfterValidator(_path)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MAY_DIFFER = "It may differ between nodes."
NodePath = Annotated[PathText, MAY_DIFFER]
"""A path that nodes may have under different names, because the ranks compare what is read from it."""
Precision = Literal["auto", "bfloat16", "float32", "float64"]
