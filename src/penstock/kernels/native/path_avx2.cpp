#include "simd_avx2.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels avx2_kernels = table_of("avx2");

}  // namespace penstock
