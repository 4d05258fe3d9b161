// The calls that run a model: embedding, layers, head.
#include <cmath>
#include <cstring>

#include "context.h"

using namespace penstock;

namespace {

constexpr int SLICE = 512;  // rows whose widest activations are held at a time

int guarded_allocation() { return fail("There is not enough memory for the activations."); }

void norm_rows(ps_context& c, const float* x, const float* weight, float eps, const ps_matrix* parts, int count, int m) {
    const int n = parts[0].cols;
    c.input.resize(m, n);
    c.for_rows(m, [&](int row) {
        const float* own = x + static_cast<int64_t>(row) * n;
        if (weight)
            c.kernels->rms_norm(own, weight, n, eps, c.input.row(row), false);
        else
            memcpy(c.input.row(row), own, static_cast<size_t>(n) * sizeof(float));
        c.finish_row(parts, count, row);
    });
}

// hidden += matrix * input, normed first where the model does that
void add_product(ps_context& c, const ps_model& model, const ps_matrix& matrix, const float* norm, int m, float* hidden) {
    if (!norm) {
        c.product(&matrix, 1, m, {hidden, model.hidden, true});
        return;
    }
    float* added = c.wide.take<float>(static_cast<int64_t>(m) * model.hidden);
    c.product(&matrix, 1, m, {added, model.hidden, false});
    c.for_rows(m, [&](int row) {
        const int64_t at = static_cast<int64_t>(row) * model.hidden;
        c.kernels->rms_norm(added + at, norm, model.hidden, model.norm_eps, hidden + at, true);
    });
}

void run_mlp(ps_context& c, const ps_model& model, const ps_layer& layer, int m, float* hidden) {
    const int64_t inner = model.intermediate;
    norm_rows(c, hidden, layer.mlp_norm, model.norm_eps, layer.gate_up, 2, m);
    float* gate_up = c.wide.take<float>(m * 2 * inner);
    c.product(layer.gate_up, 2, m, {gate_up, 2 * inner, false});
    c.input.resize(m, model.intermediate);
    c.for_rows(m, [&](int row) {
        const float* own = gate_up + row * 2 * inner;
        c.kernels->gate(model.activation, own, own + inner, model.intermediate, c.input.row(row));
        c.finish_row(&layer.down, 1, row);
    });
    add_product(c, model, layer.down, layer.post_mlp_norm, m, hidden);
}

void run_attention(ps_context& c, const ps_model& model, const ps_layer& layer, const ps_batch& batch, int m, float* hidden) {
    const int64_t width = static_cast<int64_t>(model.heads + 2 * model.kv_heads) * model.head_dim;
    norm_rows(c, hidden, layer.input_norm, model.norm_eps, layer.qkv, 3, m);
    float* qkv = c.wide.take<float>(m * width);
    c.product(layer.qkv, 3, m, {qkv, width, false});
    c.input.resize(m, model.heads * model.head_dim);
    c.attend(model, layer, batch, m, qkv, nullptr);
    c.for_rows(m, [&](int row) { c.finish_row(&layer.output, 1, row); });
    add_product(c, model, layer.output, layer.post_attention_norm, m, hidden);
}

void best_of_row(const float* logits, int n, int32_t* best) {
    int found = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[found]) found = i;
    *best = found;
}

}  // namespace

int ps_run_layers(ps_context* context, const ps_model* model, int first, int last, const ps_batch* batch, float* hidden) try {
    if (check_model(*model, first, last)) return -1;
    const int m = check_batch(*model, first, last, *batch);
    if (m <= 0) return m;
    const std::lock_guard<std::mutex> alone(context->one_call);
    context->locate(*batch, m);
    for (int i = first; i < last; i++) {
        const ps_layer& layer = model->layers[i];
        run_attention(*context, *model, layer, *batch, m, hidden);
        for (int row = 0; row < m; row += SLICE)
            run_mlp(*context, *model, layer, m - row < SLICE ? m - row : SLICE,
                    hidden + static_cast<int64_t>(row) * model->hidden);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return guarded_allocation();
}

int ps_product(ps_context* context, ps_matrix matrix, int m, const float* x, float* y) try {
    if (check_matrix(matrix)) return -1;
    if (m < 0) return fail("%d rows are negative.", m);
    const std::lock_guard<std::mutex> alone(context->one_call);
    norm_rows(*context, x, nullptr, 0.0f, &matrix, 1, m);
    context->product(&matrix, 1, m, {y, matrix.rows, false});
    return 0;
} catch (const std::bad_alloc&) {
    return guarded_allocation();
}

int ps_embed(ps_context* context, ps_matrix matrix, int m, const int32_t* ids, float scale, float* out) {
    if (check_matrix(matrix)) return -1;
    for (int i = 0; i < m; i++)
        if (ids[i] < 0 || ids[i] >= matrix.rows) return fail("Token %d is not among %d.", ids[i], matrix.rows);
    context->for_rows(m, [&](int row) {
        float* own = out + static_cast<int64_t>(row) * matrix.cols;
        unpack_row(matrix, ids[row], own);
        if (scale != 1.0f)
            for (int k = 0; k < matrix.cols; k++) own[k] *= scale;
    });
    return 0;
}

int ps_head(ps_context* context, ps_matrix matrix, const float* norm, float eps, int m, const float* hidden, float* logits,
            int32_t* best) try {
    if (check_matrix(matrix)) return -1;
    if (m < 0) return fail("%d rows are negative.", m);
    constexpr int ROWS = 64;
    const std::lock_guard<std::mutex> alone(context->one_call);
    for (int row = 0; row < m; row += ROWS) {
        const int own = m - row < ROWS ? m - row : ROWS;
        norm_rows(*context, hidden + static_cast<int64_t>(row) * matrix.cols, norm, eps, &matrix, 1, own);
        const int64_t at = static_cast<int64_t>(row) * matrix.rows;
        float* to = logits ? logits + at : context->logits.take<float>(static_cast<int64_t>(own) * matrix.rows);
        context->product(&matrix, 1, own, {to, matrix.rows, false});
        if (best)
            context->for_rows(
                own, [&](int i) { best_of_row(to + static_cast<int64_t>(i) * matrix.rows, matrix.rows, best + row + i); });
    }
    return 0;
} catch (const std::bad_alloc&) {
    return guarded_allocation();
}

// ---- parts of a layer ----

int ps_rms_norm(ps_context* context, int m, int n, const float* x, const float* weight, float eps, float* y) {
    context->for_rows(m, [&](int row) {
        const int64_t at = static_cast<int64_t>(row) * n;
        context->kernels->rms_norm(x + at, weight, n, eps, y + at, false);
    });
    return 0;
}

int ps_gate(ps_context* context, int activation, int m, int n, const float* gate_up, float* y) {
    if (activation != PS_SILU && activation != PS_GELU_TANH) return fail("There is no activation %d.", activation);
    context->for_rows(m, [&](int row) {
        const float* own = gate_up + static_cast<int64_t>(row) * 2 * n;
        context->kernels->gate(activation, own, own + n, n, y + static_cast<int64_t>(row) * n);
    });
    return 0;
}

int ps_attention(ps_context* context, const ps_model* model, int layer, const ps_batch* batch, float* qkv, float* out) try {
    if (layer < 0 || layer >= model->layer_count) return fail("There is no layer %d.", layer);
    const int m = check_batch(*model, layer, layer + 1, *batch);
    if (m <= 0) return m;
    const std::lock_guard<std::mutex> alone(context->one_call);
    context->locate(*batch, m);
    context->attend(*model, model->layers[layer], *batch, m, qkv, out);
    return 0;
} catch (const std::bad_alloc&) {
    return guarded_allocation();
}
