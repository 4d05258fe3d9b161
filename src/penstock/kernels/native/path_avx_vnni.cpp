#define PS_AVX_VNNI
#include "simd_avx2.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels avx_vnni_kernels = table_of("avx-vnni");

}  // namespace penstock
