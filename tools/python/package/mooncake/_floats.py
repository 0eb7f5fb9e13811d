"""Conversions of element types that numpy lacks: bfloat16, kept as uint16, and float8 e4m3fn, kept as uint8.

Both round to the nearest value, ties to even, as torch does on CPUs. Pure functions over whole arrays.
"""

import numpy

#: Columns that share one scale.
SCALE_COLUMNS = 128
#: The largest finite float8 e4m3fn.
E4M3_LARGEST = numpy.float32(448.0)
#: The least maximum of a block, so that no scale is 0.
LEAST_MAXIMUM = numpy.float32(1e-4)
_E4M3_NOT_A_NUMBER = 0x7F
#: Bits of 480.0, from which on no float8 is near enough, of 2**-6, the least normal float8, and of 2**14: a number of
#: at most 2**-6 that is added to it is rounded to a multiple of 2**-9, the distance of subnormal float8.
_TOO_LARGE, _LEAST_NORMAL, _ROUNDER = 0x43F00000, 0x3C800000, 0x46800000


def bf16_to_f32(words):
    """Returns float32 of bfloat16 words (uint16); exact."""
    return (words.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)


def f32_to_bf16(values):
    """Returns bfloat16 words (uint16) of float32; what is not a number becomes 0x7FC0."""
    values = numpy.ascontiguousarray(values, dtype=numpy.float32)
    bits = values.view(numpy.uint32)
    # The sum overflows for no number: words of the largest exponent are infinities, which it leaves as they are.
    words = ((bits + (((bits >> 16) & 1) + numpy.uint32(0x7FFF))) >> 16).astype(numpy.uint16)
    return numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), words)


def f32_to_e4m3(values):
    """Returns float8 e4m3fn (uint8) of float32; not a number is what rounds to more than 448."""
    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    sign = ((bits >> 24) & 0x80).astype(numpy.uint8)
    bits = bits & numpy.uint32(0x7FFFFFFF)
    # The exponent's bias falls from 127 to 7, and 20 bits of the mantissa go.
    normal = (bits + (((bits >> 20) & 1) + numpy.uint32(0x7FFFF)) - numpy.uint32(120 << 23)) >> 20
    small = numpy.minimum(bits, numpy.uint32(_LEAST_NORMAL)).view(numpy.float32)
    rounder = numpy.uint32(_ROUNDER).view(numpy.float32)
    subnormal = (small + rounder).view(numpy.uint32) - numpy.uint32(_ROUNDER)
    chosen = numpy.where(bits < _LEAST_NORMAL, subnormal, normal)
    return numpy.where(bits < _TOO_LARGE, chosen, _E4M3_NOT_A_NUMBER).astype(numpy.uint8) | sign


def _e4m3_values():
    """float32 of all 256 values."""
    codes = numpy.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = numpy.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = numpy.where(codes & 0x7F == _E4M3_NOT_A_NUMBER, numpy.nan, values)
    return numpy.where(codes & 0x80, -values, values).astype(numpy.float32)


_E4M3_VALUES = _e4m3_values()


def e4m3_to_f32(codes):
    """Returns float32 of float8 e4m3fn (uint8); exact."""
    return _E4M3_VALUES[codes]


def scaled_to_e4m3(words):
    """Casts rows of bfloat16 to float8 with a scale for each 128 columns.

    The scale is the block's largest magnitude, at least 1e-4, divided by 448; an element is its value, times 448
    divided by that magnitude. Returns uint8 of the rows' shape, and float32 scales of (rows, columns / 128).
    """
    rows, columns = words.shape
    values = bf16_to_f32(words).reshape(rows, columns // SCALE_COLUMNS, SCALE_COLUMNS)
    largest = numpy.maximum(numpy.abs(values).max(axis=2, initial=0.0), LEAST_MAXIMUM)
    # Infinities give 0 times infinity, which is not a number, without a warning.
    with numpy.errstate(invalid="ignore", over="ignore"):
        codes = f32_to_e4m3(values * (E4M3_LARGEST / largest)[:, :, None])
    return codes.reshape(rows, columns), largest / E4M3_LARGEST
