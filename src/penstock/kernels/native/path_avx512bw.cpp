// The path for processors that have AVX-512, but no instruction for dot products of bytes.
#include "simd_avx512.h"

#include "kernels.inl"
#include "rows_avx512.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels avx512bw_kernels = table_of("avx512bw", product_of_rows);

}  // namespace penstock
