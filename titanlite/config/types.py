"""Types that several options share. Error messages read the bounds from the type, so they name the true range."""

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
"""Most steps, sequences, channels or seconds: what torch's kernels count in an int32; steps of 0.1 s last 7 years."""
MOST_TOKENS = 2**53
"""Most tokens or parameters: larger integers are not exact in float64, in which plans and metrics compute."""
MOST_RANKS = 2**16
"""Most ranks: four times as many as in the largest published run (arXiv:2407.21783). torch makes a tensor for every
rank that a weight is sharded over, on each rank and in a plan."""
MOST_LAYERS = 4096
"""Most layers, each of which every rank, and a plan, builds. Published models have at most 1,000 (arXiv:2203.00555)."""
Count = Annotated[int, Field(ge=1, le=MOST_ITEMS)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST_ITEMS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MAY_DIFFER = "It may differ between nodes."
NodePath = Annotated[str, AfterValidator(_path), MAY_DIFFER]
"""A path, which may begin with ~. It may differ between nodes: the ranks compare what is read from it."""
Precision = Literal["auto", "bfloat16", "float32", "float64"]
