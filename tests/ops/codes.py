"""What every code of a format in few bits stands for, by ml_dtypes and by the tables that papers give, in float64."""

import ml_dtypes
import numpy as np

from fdel.ops.weights import FP4, NF4

BYTES = np.arange(256, dtype=np.uint8)
CODES = {
    "fp8": BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "e5m2": BYTES.view(ml_dtypes.float8_e5m2).astype(np.float64),
    "e2m1": BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64),
    "nf4": np.asarray(NF4),
    "fp4": np.asarray(FP4),
}
