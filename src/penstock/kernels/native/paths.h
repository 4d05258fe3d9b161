// The paths that this build has, best first.
#pragma once
#include "kernels.h"

namespace penstock {

extern const Kernels portable_kernels;
#if defined(__aarch64__)
extern const Kernels neon_kernels;
#elif defined(__x86_64__)
extern const Kernels avx2_kernels, avx_vnni_kernels, avx512bw_kernels, avx512_kernels, amx_kernels;
#endif

}  // namespace penstock
