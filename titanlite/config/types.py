"""Types that several options share. Error messages take an option's bounds from its type."""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from titanlite.config.loader import OWN_MESSAGE


def _path(text: str) -> str:
    path = os.path.expanduser(text)
    if len(os.fsencode(path)) > 4095 or any(len(os.fsencode(name)) > 255 for name in path.split("/")):
        raise PydanticCustomError(OWN_MESSAGE, "expected a path of at most 4,095 bytes, each name at most 255")
    if path.startswith("~"):
        raise PydanticCustomError(OWN_MESSAGE, "expected a path; its ~ names no home folder (a name: ./~)")
    return text


PathText = Annotated[str, AfterValidator(_path), AfterValidator(os.path.expanduser)]
MOST_ITEMS = 2**31 - 1
"""Upper bound on steps, sequences, channels and seconds, since torch's kernels count in int32."""
MOST_TOKENS = 2**53
"""Upper bound on tokens and parameters: plans and metrics count in float64, where larger integers are inexact."""
MOST_RANKS = 2**16
"""Upper bound on ranks, four times the largest published run's (arXiv:2407.21783): torch creates a tensor per shard."""
MOST_LAYERS = 4096
"""Upper bound on layers, all of which a rank builds. Published models have up to 1,000 (arXiv:2203.00555)."""
Count = Annotated[int, Field(ge=1, le=MOST_ITEMS)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST_ITEMS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MAY_DIFFER = "It may differ between nodes."
NodePath = Annotated[str, AfterValidator(_path), MAY_DIFFER]
"""A path, which may begin with ~ and may differ between nodes: ranks compare the files' contents, not the paths."""
Precision = Literal["auto", "bfloat16", "float32", "float64"]
