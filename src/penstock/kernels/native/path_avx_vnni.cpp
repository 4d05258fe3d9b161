#define PS_AVX_VNNI
#include "simd_avx2.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels avx_vnni_kernels = {"avx-vnni", quantise_row, product,        rms_norm_row,   rotate_head,
                                         gate_row,   store_row,    choose_experts, largest_of_row, weigh_logits,
                                         attend,     merge_states, finish_state};

}  // namespace penstock
