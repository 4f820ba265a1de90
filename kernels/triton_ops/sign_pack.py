"""Signs with a scale for each block, as Triton kernels: those of `quantize`, in the format "sign".

Lives here: `sign_pack` and `sign_unpack` on a GPU. Imports `kernels.triton_ops` only. Same results as
`kernels.sign_pack`, but for the order in which a scale is summed.
"""

from kernels.triton_ops.quantize import dequantize as sign_unpack
from kernels.triton_ops.quantize import quantize as sign_pack

__all__ = ["sign_pack", "sign_unpack"]
