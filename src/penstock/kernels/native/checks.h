// Messages of errors, and checks of what callers pass.
#pragma once
#include "kernels.h"

namespace penstock {

int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));  // sets what ps_error() returns; -1
int check_matrix(const ps_matrix& matrix);
int check_model(const ps_model& model, int first, int last);
int check_batch(const ps_model& model, int first, int last, const ps_batch& batch);  // rows in all, or -1

void unpack_row(const ps_matrix& matrix, int row, float* out);

}  // namespace penstock
