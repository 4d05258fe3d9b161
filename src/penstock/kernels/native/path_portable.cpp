#include "simd_portable.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels portable_kernels = table_of("portable");

}  // namespace penstock
