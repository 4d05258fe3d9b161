// Reads GGUF's blocks and plain numbers as groups of 32.
#pragma once
#include <cstdint>

#include "penstock.h"

namespace penstock {

// value = scale * code + minimum, or plain values where `coded` is false
struct SourceGroup {
    bool coded;
    int8_t codes[32];
    float scale, minimum;
    float values[32];
};

int row_bytes(int type, int cols);  // 0 for a type that cannot be read, or cols that its blocks do not divide
SourceGroup read_group(int type, const uint8_t* row, int group, int cols);  // numbers past cols are 0
int natural_kind(int type);

}  // namespace penstock
