// The draft step's small operations on CPU, a call each. Plain C interface, no torch: kernels/native.py passes pointers.
//
// All sums are in float32. bfloat16 is read by shifting and written by rounding to nearest, ties to even, where the eager
// form rounds: after the residual addition, after the norm, after the rotation. Tensors are contiguous unless said.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <typename T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;  // rounding would carry a NaN's mantissa into infinity
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return bf16{static_cast<uint16_t>(is_nan ? nan : rounded)};
}

// total = x + residual; out = total * rsqrt(mean(total^2) + eps) * weight. Rows of x are `pitch` elements apart, those of out `stride`.
template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t size, int64_t pitch,
                  int64_t stride, float eps) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* in = x + r * pitch;
        if (residual != nullptr) {
            const T* add = residual + r * size;
            T* sum = total + r * size;
            for (int64_t i = 0; i < size; ++i) sum[i] = narrow<T>(wide(in[i]) + wide(add[i]));
            in = sum;
        }
        float square = 0.0f;
        for (int64_t i = 0; i < size; ++i) square += wide(in[i]) * wide(in[i]);
        const float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
        T* to = out + r * stride;
        for (int64_t i = 0; i < size; ++i) to[i] = narrow<T>(wide(in[i]) * scale * wide(weight[i]));
    }
}

// out = silu(gate) * up for rows of gate and up side by side, [rows, 2 * size].
template <typename T> void silu_mul(const T* joined, T* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r) {
        const T *gate = joined + 2 * r * size, *up = gate + size;
        T* to = out + r * size;
        for (int64_t i = 0; i < size; ++i) {
            const float g = wide(gate[i]);
            to[i] = narrow<T>(wide(narrow<T>(g / (1.0f + std::exp(-g)))) * wide(up[i]));
        }
    }
}

// joined [n, width, heads + 2 kv, d]: rotates queries and keys in place (neox halves), then stores keys and values.
// cos, sin [*, d] float32, the first half of sin negated. Token (r, t) goes to place index[r * width + t] of keys and values
// [places, kv * d], or, where index is null, to (first + r) * length + start + t.
template <typename T>
void rope_write(T* joined, const float* cos, const float* sin, const int64_t* positions, T* keys, T* values, const int64_t* index,
                int64_t n, int64_t width, int64_t heads, int64_t kv, int64_t d, int64_t first, int64_t start, int64_t length) {
    const int64_t half = d / 2, line = kv * d;
    for (int64_t r = 0; r < n; ++r)
        for (int64_t t = 0; t < width; ++t) {
            const int64_t token = r * width + t;
            T* row = joined + token * (heads + 2 * kv) * d;
            const float *c = cos + positions[token] * d, *s = sin + positions[token] * d;
            for (int64_t h = 0; h < heads + kv; ++h) {
                T* x = row + h * d;
                for (int64_t i = 0; i < half; ++i) {
                    const float low = wide(x[i]), high = wide(x[i + half]);
                    x[i] = narrow<T>(low * c[i] + high * s[i]);
                    x[i + half] = narrow<T>(high * c[i + half] + low * s[i + half]);
                }
            }
            const int64_t place = index != nullptr ? index[token] : (first + r) * length + start + t;
            std::memcpy(keys + place * line, row + heads * d, line * sizeof(T));
            std::memcpy(values + place * line, row + (heads + kv) * d, line * sizeof(T));
        }
}

// Causal attention of the queries in joined [n, width, heads + 2 kv, d] over their own rows of keys and values
// [batch * length, kv, d]: token (r, t) sees places 0 .. positions[r, t] of row rows[r] (first + r where rows is null).
// out [n, width, heads, d]. scores: scratch of `length` floats.
template <typename T>
void attend(const T* joined, const T* keys, const T* values, const int64_t* positions, const int64_t* rows, T* out, float* scores,
            int64_t n, int64_t width, int64_t heads, int64_t kv, int64_t d, int64_t first, int64_t length, float scale) {
    const int64_t line = kv * d, groups = heads / kv;
    float query[512], sum[512];
    for (int64_t r = 0; r < n; ++r) {
        const int64_t base = (rows != nullptr ? rows[r] : first + r) * length * line;
        for (int64_t t = 0; t < width; ++t) {
            const int64_t token = r * width + t, seen = positions[token] + 1;
            for (int64_t h = 0; h < heads; ++h) {
                const T* q = joined + (token * (heads + 2 * kv) + h) * d;
                for (int64_t i = 0; i < d; ++i) query[i] = wide(q[i]) * scale, sum[i] = 0.0f;
                const T *k = keys + base + (h / groups) * d, *v = values + base + (h / groups) * d;
                float top = -INFINITY;
                for (int64_t p = 0; p < seen; ++p) {
                    const T* one = k + p * line;
                    float score = 0.0f;
                    for (int64_t i = 0; i < d; ++i) score += query[i] * wide(one[i]);
                    scores[p] = score;
                    top = score > top ? score : top;
                }
                float total = 0.0f;
                for (int64_t p = 0; p < seen; ++p) total += scores[p] = std::exp(scores[p] - top);
                for (int64_t p = 0; p < seen; ++p) {
                    const T* one = v + p * line;
                    const float weight = scores[p];
                    for (int64_t i = 0; i < d; ++i) sum[i] += weight * wide(one[i]);
                }
                T* to = out + (token * heads + h) * d;
                for (int64_t i = 0; i < d; ++i) to[i] = narrow<T>(sum[i] / total);
            }
        }
    }
}

// The first index of each row's largest value, [rows]; a row's NaN counts as the largest, as in torch.
template <typename T> void argmax(const T* x, int64_t* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* row = x + r * size;
        float best = -INFINITY;
        bool bad = false;
        for (int64_t i = 0; i < size; ++i) {
            const float value = wide(row[i]);
            bad |= value != value;
            best = value > best ? value : best;
        }
        int64_t at = 0;
        while (at < size && (bad ? wide(row[at]) == wide(row[at]) : wide(row[at]) != best)) ++at;
        out[r] = at;
    }
}

}  // namespace

#define EACH(T, NAME)                                                                                                              \
    extern "C" void add_rms_norm_##NAME(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows,            \
                                        int64_t size, int64_t pitch, int64_t stride, float eps) {                                  \
        add_rms_norm<T>(x, residual, weight, out, total, rows, size, pitch, stride, eps);                                          \
    }                                                                                                                              \
    extern "C" void silu_mul_##NAME(const T* joined, T* out, int64_t rows, int64_t size) { silu_mul<T>(joined, out, rows, size); } \
    extern "C" void argmax_##NAME(const T* x, int64_t* out, int64_t rows, int64_t size) { argmax<T>(x, out, rows, size); }         \
    extern "C" void rope_write_##NAME(T* joined, const float* cos, const float* sin, const int64_t* positions, T* keys, T* values, \
                                      const int64_t* index, int64_t n, int64_t width, int64_t heads, int64_t kv, int64_t d,        \
                                      int64_t first, int64_t start, int64_t length) {                                              \
        rope_write<T>(joined, cos, sin, positions, keys, values, index, n, width, heads, kv, d, first, start, length);             \
    }                                                                                                                              \
    extern "C" void attend_##NAME(const T* joined, const T* keys, const T* values, const int64_t* positions, const int64_t* rows,  \
                                  T* out, float* scores, int64_t n, int64_t width, int64_t heads, int64_t kv, int64_t d,           \
                                  int64_t first, int64_t length, float scale) {                                                    \
        attend<T>(joined, keys, values, positions, rows, out, scores, n, width, heads, kv, d, first, length, scale);               \
    }

EACH(bf16, bfloat16)
EACH(float, float32)
