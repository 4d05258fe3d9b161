#define PS_AVX512_VNNI
#include "simd_avx512.h"

#include "kernels.inl"
#include "rows_avx512.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels avx512_kernels = table_of("avx512", product_of_rows);

}  // namespace penstock
