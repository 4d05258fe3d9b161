#include "simd_portable.h"

#include "kernels.inl"
#include "attention.inl"
#include "paths.h"

namespace penstock {

extern const Kernels portable_kernels = {"portable", quantise_row, product,        rms_norm_row,   rotate_head,
                                         gate_row,   store_row,    choose_experts, largest_of_row, weigh_logits,
                                         attend,     merge_states, finish_state};

}  // namespace penstock
