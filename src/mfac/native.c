/* Products of stored rows with a vector: numbers are converted in registers, so a pass reads what is stored and no more.
 *
 * One storage and one arithmetic a library: compiled with -DBFLOAT16, -DFLOAT16, -DFLOAT32 or -DINT8, and -DREAL=float
 * or double. Rows lie in blocks of columns: `packed`, one block [m, width] behind the other, each with m scales of its
 * own; or as one matrix [m, d], without scales. No sum depends on how rows or columns are divided between threads.
 */
#include <stdint.h>
#include <string.h>

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#if defined(BFLOAT16)
typedef uint16_t stored;
static inline float number(stored bits) { return of_bits((uint32_t)bits << 16); }
#elif defined(FLOAT16)
typedef int16_t stored;
static inline float number(stored bits) {
    /* A number below 2^-14 is written as 2^-14 and so much more, from which 2^-14 is taken again: no branch, and no
     * float32 that is subnormal. Either would cost more than all the rest. */
    int32_t size = bits & 0x7fff, small = (size - 0x400) >> 31; /* all ones, or zero */
    float value = of_bits((size << 13) + (112 << 23) + (small & 1 << 23)) - of_bits(small & 113 << 23);
    return of_bits(bits_of(value) | (bits & 0x80000000u));
}
#elif defined(FLOAT32)
typedef float stored;
#define number(value) (value)
#else
typedef int8_t stored;
#define number(value) (value)
#endif

#define AT(j) ((REAL)number(g[j]))
#define ROW(k, j) ((REAL)number(g[(k) * stride + (j)]))
#define STRIP 4096 /* columns: their part of the vector stays in cache while all rows pass; longer ones sum worse */

typedef struct {
    const stored *numbers;
    const float *scales; /* [blocks, m], or none */
    int64_t m, d, width; /* columns in a block */
    int64_t packed;
} matrix;

typedef struct {
    const stored *first; /* of row 0 */
    const float *scale;  /* of every row, or none */
    int64_t stride, length;
} strip;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The columns from `left` on that have the same scales, at most STRIP. */
static strip strip_at(const matrix *G, int64_t left) {
    int64_t index = left / G->width, start = index * G->width, width = least(G->width, G->d - start);
    strip found;
    found.first = G->numbers + (G->packed ? G->m * start + (left - start) : left);
    found.scale = G->scales ? G->scales + index * G->m : 0;
    found.stride = G->packed ? width : G->d;
    found.length = least(STRIP, start + width - left);
    return found;
}

static REAL dot(const stored *g, int64_t length, const REAL *x) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < length; j++) sum += AT(j) * x[j];
    return sum;
}

/* Four rows at once: four sums do not wait for one another, and x is read once. */
static void dots(const stored *g, int64_t stride, int64_t length, const REAL *x, REAL *sums) {
    REAL a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t j = 0; j < length; j++) {
        a += ROW(0, j) * x[j];
        b += ROW(1, j) * x[j];
        c += ROW(2, j) * x[j];
        d += ROW(3, j) * x[j];
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

/* out[i] = row i of G times x, for the rows from `top` to `bottom`, which is a multiple of four or the last. */
void project(const matrix *G, const REAL *x, int64_t top, int64_t bottom, double *out) {
    for (int64_t i = top; i < bottom; i++) out[i] = 0;
    for (int64_t left = 0; left < G->d;) {
        strip s = strip_at(G, left);
        for (int64_t i = top; i < bottom; i += 4) {
            REAL sums[4];
            int64_t rows = least(4, bottom - i);
            const stored *g = s.first + i * s.stride;
            if (rows == 4) dots(g, s.stride, s.length, x + left, sums);
            else for (int64_t k = 0; k < rows; k++) sums[k] = dot(g + k * s.stride, s.length, x + left);
            for (int64_t k = 0; k < rows; k++) out[i + k] += s.scale ? (double)sums[k] * s.scale[i + k] : (double)sums[k];
        }
        left += s.length;
    }
}

static void add(const stored *g, int64_t length, REAL a, REAL *restrict out) {
#pragma omp simd
    for (int64_t j = 0; j < length; j++) out[j] += a * AT(j);
}

/* Eight rows at once: what they are added to is read and written once. */
static void add_eight(const stored *g, int64_t stride, int64_t length, const REAL *a, REAL *restrict out) {
#pragma omp simd
    for (int64_t j = 0; j < length; j++)
        out[j] += ((a[0] * ROW(0, j) + a[1] * ROW(1, j)) + (a[2] * ROW(2, j) + a[3] * ROW(3, j))) +
                  ((a[4] * ROW(4, j) + a[5] * ROW(5, j)) + (a[6] * ROW(6, j) + a[7] * ROW(7, j)));
}

/* out[j] = column j of the first n rows of G times a, for the columns from `first` to `last`. */
void combine(const matrix *G, const double *a, int64_t n, int64_t first, int64_t last, REAL *out) {
    for (int64_t left = first; left < last;) {
        strip s = strip_at(G, left);
        s.length = least(s.length, last - left);
        memset(out + left, 0, s.length * sizeof(REAL));
        for (int64_t i = 0; i < n; i += 8) {
            REAL some[8];
            int64_t rows = least(8, n - i);
            const stored *g = s.first + i * s.stride;
            for (int64_t k = 0; k < rows; k++) some[k] = (REAL)(s.scale ? a[i + k] * s.scale[i + k] : a[i + k]);
            if (rows == 8) add_eight(g, s.stride, s.length, some, out + left);
            else for (int64_t k = 0; k < rows; k++) add(g + k * s.stride, s.length, some[k], out + left);
        }
        left += s.length;
    }
}
