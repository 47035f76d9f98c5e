"""Types that recur among options. An error message reads the bounds back, so it always names the true range."""

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["auto", "bfloat16", "float32", "float64"]
