#include "checks.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace penstock {
namespace {

thread_local char message[256] = "";

}  // namespace

int fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return -1;
}

int check_matrix(const ps_matrix& matrix) {
    if (ps_packed_bytes(matrix.kind, matrix.rows, matrix.cols) == 0 || !matrix.data)
        return fail("A matrix of kind %d with %d rows and %d columns is not packed.", matrix.kind, matrix.rows, matrix.cols);
    if (reinterpret_cast<uintptr_t>(matrix.data) % 64) return fail("Packed weights must begin at a multiple of 64 bytes.");
    return 0;
}

namespace {

// Check matrices that are stacked; a later one may be missing.
int check_stack(const char* name, const ps_matrix* parts, int count, int rows, int cols) {
    int64_t found = 0;
    for (int i = 0; i < count; i++) {
        if (i > 0 && parts[i].rows == 0) continue;
        if (check_matrix(parts[i])) return -1;
        if (parts[i].cols != cols) return fail("%s has %d columns, not %d.", name, parts[i].cols, cols);
        found += parts[i].rows;
    }
    if (found != rows) return fail("%s has %lld rows, not %d.", name, static_cast<long long>(found), rows);
    return 0;
}

int check_mlp(const ps_model& model, const ps_mlp& mlp, int intermediate) {
    if (check_stack("gate_up", mlp.gate_up, 2, 2 * intermediate, model.hidden)) return -1;
    return check_stack("down", &mlp.down, 1, model.hidden, intermediate);
}

int check_experts(const ps_model& model, const ps_experts& own) {
    if (own.per_token < 1 || own.per_token > own.count || own.intermediate < 1)
        return fail("A row cannot go through %d of %d experts.", own.per_token, own.count);
    if (check_stack("router", &own.router, 1, own.count, model.hidden)) return -1;
    for (int i = 0; i < own.count; i++)
        if (check_mlp(model, own.experts[i], own.intermediate)) return -1;
    return 0;
}

int check_layer(const ps_model& model, const ps_layer& layer) {
    const int inner = model.heads * model.head_dim;
    if (!layer.input_norm || !layer.mlp_norm || !layer.kv) return fail("A layer lacks its norms or its KV memory.");
    if (layer.rope < 0 || layer.rope >= model.rope_count) return fail("There is no rope table %d.", layer.rope);
    if (layer.group < 0 || layer.group >= model.groups) return fail("There is no group %d of layers.", layer.group);
    if (layer.window < 0) return fail("A window of %d positions is negative.", layer.window);
    if (check_stack("qkv", layer.qkv, 3, (model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden)) return -1;
    if (check_stack("output", &layer.output, 1, model.hidden, inner)) return -1;
    return layer.experts ? check_experts(model, *layer.experts) : check_mlp(model, layer.mlp, model.intermediate);
}

}  // namespace

int check_model(const ps_model& model, int first, int last) {
    if (model.hidden < 1 || model.heads < 1 || model.kv_heads < 1 || model.intermediate < 1 || model.heads % model.kv_heads)
        return fail("%d heads cannot share %d key-value heads.", model.heads, model.kv_heads);
    if (model.head_dim < 1 || model.head_dim > MAX_HEAD_DIM)
        return fail("Heads of %d numbers are not supported: at most %d.", model.head_dim, MAX_HEAD_DIM);
    if (model.kv_type != PS_TYPE_F32 && model.kv_type != PS_TYPE_F16 && model.kv_type != PS_TYPE_BF16)
        return fail("Keys and values of type %d are not supported.", model.kv_type);
    if (model.activation != PS_SILU && model.activation != PS_GELU_TANH)
        return fail("There is no activation %d.", model.activation);
    if (model.block_size < 1 || model.kv_blocks < 1) return fail("There are no KV blocks.");
    if (model.groups < 1) return fail("There are no groups of layers.");
    for (int i = 0; i < model.rope_count; i++)
        if (model.ropes[i].width < 0 || model.ropes[i].width % 2 || model.ropes[i].width > model.head_dim)
            return fail("A rope of %d numbers does not fit heads of %d.", model.ropes[i].width, model.head_dim);
    if (first < 0 || last > model.layer_count || first > last)
        return fail("Layers %d to %d are not among %d.", first, last, model.layer_count);
    for (int i = first; i < last; i++)
        if (check_layer(model, model.layers[i])) return -1;
    return 0;
}

int check_batch(const ps_model& model, int first, int last, const ps_batch& batch) {
    int64_t rows = 0;
    int64_t furthest = 0;
    // of each group: the widest window of its layers, 0 if one sees everything, -1 without layers; no block before it is read
    std::vector<int> widest(model.groups, -1);
    for (int i = first; i < last; i++) {
        const int window = model.layers[i].window;
        int& own = widest[model.layers[i].group];
        if (window == 0 || own == 0)
            own = 0;
        else if (window > own)
            own = window;
    }
    for (int i = 0; i < batch.spans; i++) {
        const int64_t start = batch.start[i], n = batch.n[i], end = start + n;
        if (start < 0 || n < 1) return fail("Span %d has %lld rows from position %lld.", i, (long long)n, (long long)start);
        const int64_t blocks = (end + model.block_size - 1) / model.block_size, table = batch.table[i];
        if (table < 0 || table + blocks * model.groups > batch.tables_size)
            return fail("The block table of span %d ends before position %lld.", i, static_cast<long long>(end));
        for (int group = 0; group < model.groups; group++) {
            const int window = widest[group];
            if (window < 0) continue;
            const int64_t seen = window > 0 && start >= window ? (start - window + 1) / model.block_size : 0;
            for (int64_t b = seen; b < blocks; b++) {
                const int32_t block = batch.tables[table + b * model.groups + group];
                if (block < 0 || block >= model.kv_blocks)
                    return fail("Block %d of span %d is not among %d.", block, i, model.kv_blocks);
            }
        }
        furthest = end > furthest ? end : furthest;
        rows += n;
    }
    for (int i = first; i < last; i++)
        if (furthest > model.ropes[model.layers[i].rope].positions)
            return fail("Position %lld is past the rope table of layer %d.", static_cast<long long>(furthest - 1), i);
    if (rows > INT32_MAX / 2) return fail("%lld rows are too many.", static_cast<long long>(rows));
    return static_cast<int>(rows);
}

}  // namespace penstock

const char* ps_error(void) { return penstock::message; }
