// What the generated steps are written in: numbers and vectors of LANES numbers, with operations that mean what torch's
// mean, to the bit. `emit` defines LANES.

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// Everything below serves single numbers and vectors alike. Truth is -1 and falsehood 0.
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all(int32_t x) { return x - Ints{}; }
template <class To, class From> INLINE To same_bits(From x) { To y; memcpy(&y, &x, sizeof x); return y; }
INLINE int32_t bits(float x) { return same_bits<int32_t>(x); }
INLINE Ints bits(Floats x) { return same_bits<Ints>(x); }
INLINE float from_bits(int32_t x) { return same_bits<float>(x); }
INLINE Floats from_bits(Ints x) { return same_bits<Floats>(x); }
INLINE int32_t mask(bool x) { return -int32_t(x); }
INLINE Ints mask(Ints x) { return x; }
template <class T> INLINE T pick(int32_t c, T a, T b) { return c ? a : b; }
INLINE Floats pick(Ints c, Floats a, Floats b) { return c ? a : b; }
INLINE Ints pick(Ints c, Ints a, Ints b) { return c ? a : b; }
// NaN stays as it is.
template <class T> INLINE T at_least(T x, T c) { return pick(mask(x < c), c, x); }
template <class T> INLINE T at_most(T x, T c) { return pick(mask(x > c), c, x); }
INLINE float number(int32_t x) { return float(x); }
INLINE Floats number(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE int32_t whole(float x) { return int32_t(x); }
INLINE Ints whole(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE int32_t shift_left(int32_t x, int n) { return int32_t(uint32_t(x) << n); }
INLINE Ints shift_left(Ints x, int n) { return x << n; }
INLINE int32_t shift_right(int32_t x, int n) { return int32_t(uint32_t(x) >> n); }
INLINE Ints shift_right(Ints x, int n) { return same_bits<Ints>(same_bits<Words>(x) >> n); }

#define EACH(name, Type, Vector, expression) \
    INLINE Type name(Type x) { return expression; } \
    INLINE Vector name(Vector x) { Vector y; for (int k = 0; k < LANES; ++k) y[k] = name(x[k]); return y; }
EACH(square_root, float, Floats, __builtin_sqrtf(x))
EACH(floor_of, float, Floats, __builtin_floorf(x))
EACH(ceiling_of, float, Floats, __builtin_ceilf(x))
EACH(truncated, float, Floats, __builtin_truncf(x))
EACH(rounded, float, Floats, __builtin_rintf(x))
// Exact: a quotient of 32-bit integers is further from the next integer than its rounding error in double precision.
INLINE int32_t divided(int32_t a, int32_t b) { return int32_t(__builtin_floor(double(a) / double(b))); }
INLINE Ints divided(Ints a, Ints b) { for (int k = 0; k < LANES; ++k) a[k] = divided(a[k], b[k]); return a; }

template <class I> INLINE auto from_bf16(I x) { return from_bits(shift_left(x, 16)); }
template <class F> INLINE auto to_bf16(F x) {
    const auto y = bits(x), nan = mask((y & 0x7FFFFFFF) > 0x7F800000);
    return (shift_right(y + 0x7FFF + (shift_right(y, 16) & 1), 16) & ~nan) | (nan & 0x7FC0);
}
template <class I> INLINE auto from_fp16(I x) {
    const auto rest = x & 0x7FFF;
    // The exponent moves by 112, and by as much again for infinities and NaN. Subnormal numbers are counts of 2^-24.
    const auto normal = (rest << 13) + (112 << 23) + (mask(rest >= 0x7C00) & (112 << 23));
    const auto value = pick(mask(rest < 0x400), bits(number(rest) * 0x1p-24f), normal);
    return from_bits(value | shift_left(x & 0x8000, 16));
}
template <class F> INLINE auto to_fp16(F x) {
    const auto rest = bits(x) & 0x7FFFFFFF, nan = mask(rest > 0x7F800000);
    const auto normal = (rest - (112 << 23) + 0xFFF + (rest >> 13 & 1)) >> 13, huge = mask(normal > 0x7C00);
    // Adding a half makes the sum's last bit worth 2^-24, the spacing of subnormal numbers.
    const auto subnormal = bits(from_bits(rest) + 0.5f) - (126 << 23);
    const auto finite = pick(mask(rest < 113 << 23), subnormal, (normal & ~huge) | (huge & 0x7C00));
    return (finite & ~nan) | (nan & 0x7E00) | (shift_right(bits(x), 16) & 0x8000);
}
// For values that `round_bits` has rounded to bf16: `rounded` where `finite` is true, and otherwise x, an infinity or a
// NaN. The sum keeps a NaN that has only low bits set a NaN.
template <class I, class F> INLINE auto to_bf16(I finite, F rounded, F x) {
    return shift_right(bits(pick(finite, rounded, x + x)), 16);
}
// Numbers in their order as integers; NaN is above all.
template <class F> INLINE auto ordered(F x) {
    const auto y = bits(x), nan = mask((y & 0x7FFFFFFF) > 0x7F800000);
    return ((y ^ (y >> 31 & 0x7FFFFFFF)) & ~nan) | (nan & 0x7FC00000);
}
INLINE Floats load(const float* x) { Floats y; memcpy(&y, x, sizeof y); return y; }
INLINE Ints load(const int32_t* x) { Ints y; memcpy(&y, x, sizeof y); return y; }
#if defined(__AVX2__) && LANES == 8
// One instruction each, which no loop is made into.
typedef char Bytes __attribute__((vector_size(16)));
typedef short Halves __attribute__((vector_size(16)));
template <class T> INLINE Bytes eight(const T* x) {
    typedef long long Pair __attribute__((vector_size(16)));
    long long y;
    memcpy(&y, x, 8);
    return Bytes(Pair{y, 0});
}
template <class T> INLINE Halves sixteen(const T* x) { Halves y; memcpy(&y, x, 16); return y; }
INLINE Ints load(const uint8_t* x) { return Ints(__builtin_ia32_pmovzxbd256(eight(x))); }
INLINE Ints load(const int8_t* x) { return Ints(__builtin_ia32_pmovsxbd256(eight(x))); }
INLINE Ints load(const uint16_t* x) { return Ints(__builtin_ia32_pmovzxwd256(sixteen(x))); }
INLINE Ints load(const int16_t* x) { return Ints(__builtin_ia32_pmovsxwd256(sixteen(x))); }
// A minimum that is not a number, or of equal numbers, is the second of two: x.
INLINE Floats at_least(Floats x, Floats c) { return __builtin_ia32_maxps256(c, x); }
INLINE Floats at_most(Floats x, Floats c) { return __builtin_ia32_minps256(c, x); }
#else
template <class T> INLINE Ints load(const T* x) { Ints y; for (int k = 0; k < LANES; ++k) y[k] = x[k]; return y; }
#endif
template <class T, class V> INLINE T largest_of(V x) {
    T y[LANES];
    memcpy(y, &x, sizeof y);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int k = 0; k < n; ++k) y[k] = y[k + n] > y[k] ? y[k + n] : y[k];
    return y[0];
}
INLINE float largest(const float* values, int count) {
    Ints most = all(INT32_MIN);
    for (int l = 0; l < count; l += LANES) {
        const Ints x = ordered(load(values + l));
        most = x > most ? x : most;
    }
    const int32_t last = largest_of<int32_t>(most);
    return from_bits(last ^ (last >> 31 & 0x7FFFFFFF));
}
INLINE float largest_number(const float* values, int count) {
    Floats most = load(values);
    for (int l = LANES; l < count; l += LANES) {
        const Floats x = load(values + l);
        most = x > most ? x : most;
    }
    return largest_of<float>(most);
}
// `largest_number` of as many neighbouring runs as a vector has numbers: half as many steps as for each on its own.
INLINE void largest_numbers(float* most, const float* values, int count) {
#if LANES == 8
    Floats x[LANES];
    for (int k = 0; k < LANES; ++k) {
        x[k] = load(values + k * count);
        for (int l = LANES; l < count; l += LANES) {
            const Floats y = load(values + k * count + l);
            x[k] = y > x[k] ? y : x[k];
        }
    }
    // Neighbours within each half, twice, and then the halves.
    for (int n = LANES; n > 2; n /= 2)
        for (int k = 0; k < n / 2; ++k) {
            const Floats a = x[2 * k], b = x[2 * k + 1];
            const Floats even = __builtin_shuffle(a, b, Ints{0, 2, 8, 10, 4, 6, 12, 14});
            const Floats odd = __builtin_shuffle(a, b, Ints{1, 3, 9, 11, 5, 7, 13, 15});
            x[k] = even > odd ? even : odd;
        }
    const Floats low = __builtin_shuffle(x[0], x[1], Ints{0, 1, 2, 3, 8, 9, 10, 11});
    const Floats high = __builtin_shuffle(x[0], x[1], Ints{4, 5, 6, 7, 12, 13, 14, 15});
    const Floats all_of = low > high ? low : high;
    memcpy(most, &all_of, sizeof all_of);
#else
    for (int k = 0; k < LANES; ++k) most[k] = largest_number(values + k * count, count);
#endif
}
template <class T, class V> INLINE void store(T* x, V y) { memcpy(x, &y, sizeof y); }
INLINE Ints counters(uint32_t first) {
    Words x;
    for (int k = 0; k < LANES; ++k) x[k] = uint32_t(k);
    return same_bits<Ints>(x + first);
}
// The low bits of whole numbers, in storage.
template <class T> INLINE void narrow(T* __restrict to, const int32_t* __restrict from, int count) {
    for (int l = 0; l < count; ++l) to[l] = T(from[l]);
}
#if defined(__AVX2__) && LANES == 8
typedef short Shorts __attribute__((vector_size(32)));
INLINE Shorts packed(Ints x, Ints y) { return Shorts(__builtin_ia32_packusdw256(x, y)); }
INLINE void narrow(uint16_t* __restrict to, const int32_t* __restrict from, int count) {
    int l = 0;
    typedef long long Pairs __attribute__((vector_size(32)));
    for (; l + 16 <= count; l += 16) {
        const Pairs x = Pairs(packed(load(from + l) & 0xFFFF, load(from + l + 8) & 0xFFFF));
        store(to + l, __builtin_shuffle(x, Pairs{0, 2, 1, 3}));
    }
    for (; l < count; ++l) to[l] = uint16_t(from[l]);
}
INLINE void narrow(uint8_t* __restrict to, const int32_t* __restrict from, int count) {
    int l = 0;
    for (; l + 32 <= count; l += 32) {
        const Shorts x = packed(load(from + l) & 0xFF, load(from + l + 8) & 0xFF);
        const Shorts y = packed(load(from + l + 16) & 0xFF, load(from + l + 24) & 0xFF);
        store(to + l, __builtin_shuffle(Ints(__builtin_ia32_packuswb256(x, y)), Ints{0, 4, 1, 5, 2, 6, 3, 7}));
    }
    for (; l < count; ++l) to[l] = uint8_t(from[l]);
}
INLINE void narrow(int8_t* __restrict to, const int32_t* __restrict from, int count) {
    narrow((uint8_t*)to, from, count);
}
#endif
