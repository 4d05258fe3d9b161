// The calls that run a model: embedding, layers, head.
#include <cmath>
#include <cstring>

#include "context.h"

using namespace penstock;

namespace {

thread_local Buffer thread_ids, thread_weights;
constexpr int SLICE = 256;  // rows whose widest activations are held at a time

int guarded_allocation() { return fail("There is not enough memory for the activations."); }

void norm_rows(ps_context& c, const float* x, const float* weight, float eps, const ps_matrix* parts, int count, int m) {
    const int n = parts[0].cols;
    const InputFormat format(parts, count);
    c.input.resize(m, n);
    c.for_rows(m, [&](int row) {
        const float* own = x + static_cast<int64_t>(row) * n;
        if (weight)
            c.kernels->rms_norm(own, weight, n, eps, c.input.row(row), false);
        else
            memcpy(c.input.row(row), own, static_cast<size_t>(n) * sizeof(float));
        c.finish_row(format, row);
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

// gate_up [m, 2 inner] -> the next input [m, inner]
void gate_rows(ps_context& c, int activation, const float* gate_up, int inner, const InputFormat& format, int m) {
    c.input.resize(m, inner);
    c.for_rows(m, [&](int row) {
        const float* own = gate_up + static_cast<int64_t>(row) * 2 * inner;
        c.kernels->gate(activation, own, own + inner, inner, c.input.row(row));
        c.finish_row(format, row);
    });
}

void run_mlp(ps_context& c, const ps_model& model, const ps_layer& layer, int m, float* hidden) {
    const int64_t inner = model.intermediate;
    const ps_mlp& mlp = layer.mlp;
    norm_rows(c, hidden, layer.mlp_norm, model.norm_eps, mlp.gate_up, 2, m);
    float* gate_up = c.wide.take<float>(m * 2 * inner);
    c.product(mlp.gate_up, 2, m, {gate_up, 2 * inner, false});
    gate_rows(c, model.activation, gate_up, model.intermediate, {&mlp.down, 1}, m);
    add_product(c, model, mlp.down, layer.post_mlp_norm, m, hidden);
}

// Which rows go through which expert. Sent rows lie one expert behind the other; those of expert e are [begin[e], begin[e + 1]).
struct Routing {
    float* shares;   // [m, per_token]
    int32_t* place;  // [m, per_token]: where the row was sent to
    int32_t* from;   // [sent]: the row
    int32_t* begin;  // [count + 1]
};

// normed [m, hidden] -> the best experts of each row
Routing route_rows(ps_context& c, const ps_experts& experts, const float* normed, int m) {
    const int count = experts.count, each = experts.per_token;
    const int64_t sent = static_cast<int64_t>(m) * each;
    norm_rows(c, normed, nullptr, 0.0f, &experts.router, 1, m);
    float* scores = c.wide.take<float>(static_cast<int64_t>(m) * count);
    c.product(&experts.router, 1, m, {scores, count, false});
    float* shares = c.routing.take<float>(4 * sent + count + 1);
    int32_t *chosen = reinterpret_cast<int32_t*>(shares + sent), *place = chosen + sent, *from = place + sent,
            *begin = from + sent;
    c.for_rows(m, [&](int row) {
        const int64_t at = static_cast<int64_t>(row) * each;
        c.kernels->choose(scores + static_cast<int64_t>(row) * count, count, each, experts.normalised, chosen + at, shares + at);
    });
    memset(begin, 0, static_cast<size_t>(count + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < sent; i++) begin[chosen[i] + 1]++;
    for (int e = 0; e < count; e++) begin[e + 1] += begin[e];
    for (int64_t i = 0; i < sent; i++) {
        place[i] = begin[chosen[i]]++;  // which moves each beginning to its end
        from[place[i]] = static_cast<int32_t>(i / each);
    }
    memmove(begin + 1, begin, static_cast<size_t>(count) * sizeof(int32_t));
    begin[0] = 0;
    return {shares, place, from, begin};
}

// Run the sent rows through `parts` matrices of each expert, stacked: the input -> out [sent, width]
void multiply_by_expert(ps_context& c, const ps_experts& experts, const Routing& routing, const ps_matrix* (*of)(const ps_mlp&),
                        int parts, float* out, int64_t width) {
    Product* list = c.products.take<Product>(static_cast<int64_t>(parts) * experts.count);
    int count = 0;
    for (int e = 0; e < experts.count; e++) {
        const int row = routing.begin[e], rows = routing.begin[e + 1] - row;
        float* y = out + row * width;
        for (int p = 0; rows > 0 && p < parts; p++) {
            const ps_matrix& matrix = of(experts.experts[e])[p];
            list[count++] = {&matrix, row, rows, {y, width, false}};
            y += matrix.rows;
        }
    }
    c.multiply(list, count);
}

void run_experts(ps_context& c, const ps_model& model, const ps_layer& layer, int m, float* hidden) {
    const ps_experts& experts = *layer.experts;
    const int width = model.hidden, each = experts.per_token, sent = m * each;
    const int64_t inner = experts.intermediate;
    InputFormat into(nullptr, 0), out_of(nullptr, 0);
    for (int e = 0; e < experts.count; e++) {
        into.include(experts.experts[e].gate_up, 2);
        out_of.include(&experts.experts[e].down, 1);
    }
    float* normed = c.normed.take<float>(static_cast<int64_t>(m) * width);
    c.for_rows(m, [&](int row) {
        const int64_t at = static_cast<int64_t>(row) * width;
        c.kernels->rms_norm(hidden + at, layer.mlp_norm, width, model.norm_eps, normed + at, false);
    });
    const Routing routing = route_rows(c, experts, normed, m);
    c.input.resize(sent, width);
    c.for_rows(sent, [&](int i) {
        memcpy(c.input.row(i), normed + static_cast<int64_t>(routing.from[i]) * width,
               static_cast<size_t>(width) * sizeof(float));
        c.finish_row(into, i);
    });
    float* gate_up = c.wide.take<float>(sent * 2 * inner);
    multiply_by_expert(c, experts, routing, [](const ps_mlp& mlp) { return mlp.gate_up; }, 2, gate_up, 2 * inner);
    gate_rows(c, model.activation, gate_up, experts.intermediate, out_of, sent);
    float* answers = c.wide.take<float>(static_cast<int64_t>(sent) * width);
    multiply_by_expert(c, experts, routing, [](const ps_mlp& mlp) { return &mlp.down; }, 1, answers, width);
    c.for_rows(m, [&](int row) {
        float* sum = normed + static_cast<int64_t>(row) * width;
        for (int j = 0; j < each; j++) {
            const int64_t at = static_cast<int64_t>(row) * each + j;
            const float* answer = answers + static_cast<int64_t>(routing.place[at]) * width;
            const float share = routing.shares[at];
            for (int k = 0; k < width; k++) sum[k] = j ? sum[k] + share * answer[k] : share * answer[k];
        }
        float* own = hidden + static_cast<int64_t>(row) * width;
        if (layer.post_mlp_norm)
            c.kernels->rms_norm(sum, layer.post_mlp_norm, width, model.norm_eps, own, true);
        else
            for (int k = 0; k < width; k++) own[k] += sum[k];
    });
}

void run_attention(ps_context& c, const ps_model& model, const ps_layer& layer, const ps_batch& batch, int m, float* hidden) {
    const int64_t width = static_cast<int64_t>(model.heads + 2 * model.kv_heads) * model.head_dim;
    norm_rows(c, hidden, layer.input_norm, model.norm_eps, layer.qkv, 3, m);
    float* qkv = c.wide.take<float>(m * width);
    c.product(layer.qkv, 3, m, {qkv, width, false});
    c.input.resize(m, model.heads * model.head_dim);
    c.attend(model, layer, batch, m, qkv, nullptr);
    const InputFormat format(&layer.output, 1);
    c.for_rows(m, [&](int row) { c.finish_row(format, row); });
    add_product(c, model, layer.output, layer.post_attention_norm, m, hidden);
}

// The ids of the `wanted` largest logits, best first, the lower of equals
void best_of_row(const Kernels& kernels, const float* logits, int n, int wanted, int32_t* ids) {
    constexpr int TILE = 128;
    int count = 0;
    for (int start = 0; start < n; start += TILE) {
        const int end = start + TILE < n ? start + TILE : n;
        if (count == wanted && !(kernels.largest(logits + start, end - start) > logits[ids[count - 1]])) continue;
        for (int i = start; i < end; i++) {
            if (count == wanted && !(logits[i] > logits[ids[count - 1]])) continue;
            int at = count < wanted ? count++ : count - 1;
            for (; at > 0 && logits[i] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
            ids[at] = i;
        }
    }
}

float dot(const float* a, const float* b, int n) {
    float sums[LANES] = {};
    int k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int i = 0; i < LANES; i++) sums[i] += a[k + i] * b[k + i];
    for (; k < n; k++) sums[0] += a[k] * b[k];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

// Compute the best logits again, from inputs that are not rounded
void refine_row(const Kernels& kernels, const ps_matrix& matrix, const float* x, int refined, float* logits) {
    int32_t* ids = thread_ids.take<int32_t>(refined);
    float* weights = thread_weights.take<float>(matrix.cols);
    best_of_row(kernels, logits, matrix.rows, refined, ids);
    for (int i = 0; i < refined; i++) {
        unpack_row(matrix, ids[i], weights);
        logits[ids[i]] = dot(x, weights, matrix.cols) + (matrix.bias ? matrix.bias[ids[i]] : 0.0f);
    }
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
        for (int row = 0; row < m; row += SLICE) {
            const auto run = layer.experts ? run_experts : run_mlp;
            run(*context, *model, layer, m - row < SLICE ? m - row : SLICE, hidden + static_cast<int64_t>(row) * model->hidden);
        }
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

int ps_head(ps_context* context, ps_matrix matrix, const float* norm, float eps, int m, const float* hidden, int refined,
            float* logits) try {
    if (check_matrix(matrix)) return -1;
    if (m < 0 || refined < 0 || refined > matrix.rows) return fail("There are no %d rows of %d best logits.", m, refined);
    constexpr int ROWS = 64;
    const std::lock_guard<std::mutex> alone(context->one_call);
    for (int row = 0; row < m; row += ROWS) {
        const int own = m - row < ROWS ? m - row : ROWS;
        float* to = logits + static_cast<int64_t>(row) * matrix.rows;
        norm_rows(*context, hidden + static_cast<int64_t>(row) * matrix.cols, norm, eps, &matrix, 1, own);
        context->product(&matrix, 1, own, {to, matrix.rows, false});
        if (refined)
            context->for_rows(own, [&](int i) {
                refine_row(*context->kernels, matrix, context->input.row(i), refined, to + static_cast<int64_t>(i) * matrix.rows);
            });
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
