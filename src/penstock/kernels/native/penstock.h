// The C interface of Penstock's CPU kernels. Layouts and rules: README.md beside this file.
// All functions that return int return 0, or -1 after setting the message that ps_error() returns (per thread).
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define PS_INTERFACE 6  // raised with every change of a struct or function below

// Packed layouts of a weight matrix.
enum ps_kind {
    PS_Q4 = 1,   // scale * (code - 8)
    PS_Q4M = 2,  // scale * code + minimum
    PS_Q8 = 3,   // scale * code
    PS_Q8M = 4,  // scale * code + minimum
    PS_BF16 = 5,
    PS_F16 = 6,
    PS_F32 = 7,
};

// Types of numbers in memory, and of GGUF blocks: GGUF's own numbers.
enum ps_type {
    PS_TYPE_F32 = 0,
    PS_TYPE_F16 = 1,
    PS_TYPE_Q4_0 = 2,
    PS_TYPE_Q4_1 = 3,
    PS_TYPE_Q5_0 = 6,
    PS_TYPE_Q5_1 = 7,
    PS_TYPE_Q8_0 = 8,
    PS_TYPE_Q4_K = 12,
    PS_TYPE_Q5_K = 13,
    PS_TYPE_Q6_K = 14,
    PS_TYPE_BF16 = 30,
};

enum ps_activation { PS_SILU = 0, PS_GELU_TANH = 1 };

// A packed matrix: rows outputs, cols inputs. data is 64-byte aligned; rows = 0 means that there is none.
typedef struct {
    int32_t kind, rows, cols;
    const void* data;
    const float* bias;  // [rows], or NULL
} ps_matrix;

typedef struct {
    ps_matrix gate_up[2];  // stacked: together 2 * intermediate rows
    ps_matrix down;        // [hidden, intermediate]
} ps_mlp;

// A mixture of experts: each row goes through the per_token experts that the router scores best.
typedef struct {
    int32_t count, per_token, intermediate;
    int32_t normalised;  // not 0: the shares of a row's experts add up to one
    ps_matrix router;    // [count, hidden]
    const ps_mlp* experts;
} ps_experts;

typedef struct {
    const float* input_norm;           // [hidden]
    const float* qk_norm;              // [heads + kv_heads, head_dim], or NULL
    const float* post_attention_norm;  // [hidden], or NULL
    const float* mlp_norm;             // [hidden]
    const float* post_mlp_norm;        // [hidden], or NULL
    ps_matrix qkv[3];                  // stacked: together (heads + 2 kv_heads) * head_dim rows
    ps_matrix output;                  // [hidden, heads * head_dim]
    ps_mlp mlp;                        // where there are no experts
    const ps_experts* experts;         // or NULL
    void* kv;                          // [kv_blocks * block_size, 2, kv_heads, head_dim] in kv_type
    int32_t window;                    // positions that a token sees, itself included; 0 for all
    int32_t rope;                      // index of its table
    int32_t group;                     // of layers with the same block tables, below groups; they may share kv with others
} ps_layer;

typedef struct {
    const float* cos;  // [positions, width / 2]
    const float* sin;  // [positions, width / 2]
    int32_t width;     // rotated numbers at the front of each head
    int32_t positions;
} ps_rope;

typedef struct {
    int32_t hidden, heads, kv_heads, head_dim, intermediate;
    int32_t activation;
    int32_t kv_type;  // PS_TYPE_F32, PS_TYPE_F16 or PS_TYPE_BF16
    int32_t block_size, kv_blocks;
    int32_t groups;  // of layers
    int32_t layer_count, rope_count;
    float norm_eps;
    const ps_layer* layers;
    const ps_rope* ropes;
} ps_model;

// A batch of spans, as columns. Span i is n[i] rows at positions from start[i]; the rows of all spans lie one after another.
// Its block table begins at tables[table[i]]: for every block_size positions a block of each group of layers, side by side.
typedef struct {
    int32_t spans;
    int32_t tables_size;  // entries of tables
    const int32_t* tables;
    const int32_t* table;
    const int32_t* start;
    const int32_t* n;
} ps_batch;

// How to choose a token of a row of logits.
typedef struct {
    double noise;       // in [0, 1): which of the tokens, in the order of their ids, each as wide as its probability
    float temperature;  // 0: the best token, the lowest id of equals
    float top_p;        // 1 for all
    float min_p;        // of the best token's probability
    int32_t top_k;      // 0 for all
} ps_choice;

typedef struct ps_context ps_context;  // threads and scratch memory; calls take turns

int ps_interface(void);
const char* ps_error(void);

// Paths: sets of kernels for a kind of processor, best first. NULL past the end.
const char* ps_path(int index);
int ps_path_usable(const char* path);  // 1 where this processor has what the path needs

// threads = 0: as many as the affinity mask allows. path = NULL: the best usable one.
ps_context* ps_context_new(int threads, const char* path);
void ps_context_free(ps_context*);
const char* ps_context_path(const ps_context*);
int ps_context_threads(const ps_context*);

// Packing. A source row is cols numbers, or cols / 32 (or / 256) GGUF blocks.
size_t ps_packed_bytes(int kind, int rows, int cols);  // 0 for an unknown kind
int ps_natural_kind(int type);                         // the layout that keeps what this source says; 0 if it cannot be read
// Write rows [row, row + count) of a matrix; source row order[i], or i where order is NULL, becomes row + i.
int ps_pack(ps_matrix matrix, void* data, int row, int count, int type, const void* source, const int32_t* order);
int ps_unpack(ps_matrix matrix, int row, int count, float* out);  // [count, cols]

// y[m, rows] = x[m, cols] * matrix^T + bias
int ps_product(ps_context*, ps_matrix matrix, int m, const float* x, float* y);
// Run a batch [rows of all spans, hidden] through layers [first, last) in place, and store its keys and values.
int ps_run_layers(ps_context*, const ps_model*, int first, int last, const ps_batch*, float* hidden);
// out[m, cols] = rows ids[m] of the matrix, times scale
int ps_embed(ps_context*, ps_matrix matrix, int m, const int32_t* ids, float scale, float* out);
// logits[m, rows] of hidden states; norm NULL: the states are normed already. The largest `refined` logits of each row are
// computed again, from inputs that are not rounded.
int ps_head(ps_context*, ps_matrix matrix, const float* norm, float eps, int m, const float* hidden, int refined, float* logits);
// Choose a token for each row of logits [m, n]; -1 where a difference in rounding could make it another one.
int ps_pick(ps_context*, int m, int n, const float* logits, const ps_choice* choices, int32_t* tokens);

// Parts of a layer, for tests.
int ps_rms_norm(ps_context*, int m, int n, const float* x, const float* weight, float eps, float* y);
int ps_gate(ps_context*, int activation, int m, int n, const float* gate_up, float* y);  // gate_up [m, 2n] -> y [m, n]
// qkv [rows, (heads + 2 kv_heads) * head_dim], rotated and stored -> out [rows, heads * head_dim]
int ps_attention(ps_context*, const ps_model*, int layer, const ps_batch*, float* qkv, float* out);
// Call run(argument, i) for each i below items on the context's threads.
int ps_parallel(ps_context*, int items, void (*run)(void* argument, int item), void* argument);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
