/* Products of stored rows with a vector: numbers are converted in registers, so a pass reads what is stored and no more.
 *
 * Rows are a matrix [m, d] of one storage type (-DBFLOAT16, -DFLOAT16, -DFLOAT32 or -DINT8). Where there are scales,
 * [blocks, m], they multiply the numbers of a row in a block of columns. The functions come twice, for arithmetic in
 * float and in double. No sum depends on how rows or columns are divided between threads.
 */
#ifndef REAL
#include <stdint.h>
#include <string.h>

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(BFLOAT16)
typedef uint16_t stored;
static inline float number(stored bits) { return of_bits((uint32_t)bits << 16); }
#elif defined(FLOAT16)
typedef int16_t stored;
static inline float number(stored bits) {
    /* A number below 2^-14 is written as 2^-14 plus the number, and 2^-14 is subtracted again: no branch, and no
     * subnormal float32. Either would cost more than all the rest. */
    int32_t size = bits & 0x7fff, small = (size - 0x400) >> 31; /* all ones, or zero */
    float value = of_bits((size << 13) + (112 << 23) + (small & 1 << 23)) - of_bits(small & 113 << 23);
    uint32_t found;
    memcpy(&found, &value, sizeof found);
    return of_bits(found | (bits & 0x80000000u));
}
#elif defined(FLOAT32)
typedef float stored;
#define number(value) (value)
#else
typedef int8_t stored;
#define number(value) (value)
#endif

#define STRIP 4096 /* columns: their part of the vector stays in cache while all rows pass; longer ones sum worse */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where the strip that starts at column `left` ends: it lies in one block. */
static inline int64_t strip_end(int64_t left, int64_t block, int64_t d) {
    return least(least(left + STRIP, (left / block + 1) * block), d);
}

#define PASTED(name, real) name##_##real
#define NAMED(name, real) PASTED(name, real)
#define REAL float
#include "native.c"
#undef REAL
#define REAL double
#include "native.c"

#else
#define AT(k) ((REAL)number(row[k][j]))

/* out[i] = row i of the first n rows times x, for i from `top`, a multiple of four, to `bottom`, one too, or n.
 * Four rows at once: four sums do not wait for one another, and x is read once. */
void NAMED(project, REAL)(const stored *G, const float *scales, int64_t m, int64_t d, int64_t block, const REAL *x,
                          int64_t n, int64_t top, int64_t bottom, double *out) {
    memset(out + top, 0, (bottom - top) * sizeof *out);
    for (int64_t left = 0, right; left < d; left = right) {
        right = strip_end(left, block, d);
        const float *scale = scales ? scales + left / block * m : 0;
        for (int64_t i = top; i < bottom; i += 4) {
            const stored *row[4]; /* behind the last row, that one again */
            for (int k = 0; k < 4; k++) row[k] = G + least(i + k, n - 1) * d;
            REAL a = 0, b = 0, c = 0, e = 0;
#pragma omp simd reduction(+ : a, b, c, e)
            for (int64_t j = left; j < right; j++) {
                a += AT(0) * x[j];
                b += AT(1) * x[j];
                c += AT(2) * x[j];
                e += AT(3) * x[j];
            }
            const REAL sums[4] = {a, b, c, e};
            for (int64_t k = i; k < least(i + 4, bottom); k++) out[k] += (double)sums[k - i] * (scale ? scale[k] : 1);
        }
    }
}

/* out[j] = column j of the first n rows times a, for j from `first` to `last`.
 * Eight rows at once: what they are added to is read and written once. */
void NAMED(combine, REAL)(const stored *G, const float *scales, int64_t m, int64_t d, int64_t block, const double *a,
                          int64_t n, int64_t first, int64_t last, REAL *restrict out) {
    for (int64_t left = first, right; left < last; left = right) {
        right = least(strip_end(left, block, d), last);
        const float *scale = scales ? scales + left / block * m : 0;
        memset(out + left, 0, (right - left) * sizeof *out);
        for (int64_t i = 0; i < n; i += 8) {
            const stored *row[8]; /* behind the last row, that one again, times zero */
            REAL c[8];
            for (int64_t k = 0; k < 8; k++) {
                int64_t at = least(i + k, n - 1);
                row[k] = G + at * d;
                c[k] = i + k < n ? (REAL)(a[at] * (scale ? scale[at] : 1)) : 0;
            }
#pragma omp simd
            for (int64_t j = left; j < right; j++)
                out[j] += ((c[0] * AT(0) + c[1] * AT(1)) + (c[2] * AT(2) + c[3] * AT(3))) +
                          ((c[4] * AT(4) + c[5] * AT(5)) + (c[6] * AT(6) + c[7] * AT(7)));
        }
    }
}
#undef AT
#endif
