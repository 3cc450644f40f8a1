/* Column sums of (L X)² for a lower triangular L: L X is made in registers, a tile at a time, and never written. */
#include <stdint.h>
#include <string.h>

#define LANES 8
#define ROWS 6 /* of a tile: with two vectors of columns, as many sums as registers hold */
#define COLUMNS (2 * LANES)
#define STRIP 64 /* columns that stay in cache while all of L passes */
#define LINE 16  /* numbers that come from memory together */

typedef float lanes __attribute__((vector_size(4 * LANES)));

static inline lanes load(const float *at) {
    lanes value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* L in panels of ROWS rows, each column by column up to its last, zeros where there is no row. */
void pack(const double *L, int64_t m, float *packed) {
    for (int64_t top = 0; top < m; top += ROWS)
        for (int64_t k = 0; k < least(m, top + ROWS); k++)
            for (int64_t i = top; i < top + ROWS; i++) *packed++ = i < m && k <= i ? (float)L[i * m + k] : 0;
}

/* COLUMNS columns of X behind one another, zeros where there is none. */
static void copy_strip(const float *X, int64_t m, int64_t stride, int64_t width, float *strip) {
    for (int64_t i = 0; i < m; i++, X += stride)
        for (int64_t left = 0; left < width; left += COLUMNS) {
            float *to = strip + left * m + i * COLUMNS;
            int64_t count = least(COLUMNS, width - left);
            if (count == COLUMNS) { /* a size that the compiler knows */
                memcpy(to, X + left, COLUMNS * sizeof(float));
                continue;
            }
            memcpy(to, X + left, count * sizeof(float));
            memset(to + count, 0, (COLUMNS - count) * sizeof(float));
        }
}

/* Asks for what copy_strip will read of some rows: it jumps from row to row, and would wait for memory at each. */
static void fetch(const float *X, int64_t rows, int64_t stride, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j += LINE) __builtin_prefetch(X + i * stride + j);
}

/* Sums of COLUMNS columns of X², each row with its weight. */
static void weighted_squares(const float *x, int64_t m, const float *weights, float *sums) {
    lanes first = {0}, second = {0};
    for (int64_t i = 0; i < m; i++, x += COLUMNS) {
        lanes a = load(x), b = load(x + LANES);
        first += weights[i] * (a * a);
        second += weights[i] * (b * b);
    }
    memcpy(sums, &first, sizeof first);
    memcpy(sums + LANES, &second, sizeof second);
}

/* Adds to `sums` the squares of a panel of L times COLUMNS columns of X, over the first `end` entries. */
static void add_squares(const float *panel, const float *x, int64_t end, float *sums) {
    lanes s[ROWS][2] = {{{0}}}, first = load(sums), second = load(sums + LANES);
    for (int64_t k = 0; k < end; k++, panel += ROWS, x += COLUMNS) {
        lanes a = load(x), b = load(x + LANES);
        for (int r = 0; r < ROWS; r++) {
            s[r][0] += panel[r] * a;
            s[r][1] += panel[r] * b;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        first += s[r][0] * s[r][0];
        second += s[r][1] * s[r][1];
    }
    memcpy(sums, &first, sizeof first);
    memcpy(sums + LANES, &second, sizeof second);
}

/* Column sums of (L X)², and of X² with a weight for each row, of the columns from `first` to `last`; `strip` is for
 * STRIP columns of X. */
void squares(
    const float *packed, const float *X, const float *weights, int64_t m, int64_t stride, int64_t first, int64_t last,
    float *strip, float *of_product, float *plain
) {
    for (int64_t left = first; left < last; left += STRIP) {
        int64_t width = least(STRIP, last - left);
        float sums[STRIP] = {0}, own[STRIP];
        const float *panel = packed;
        copy_strip(X + left, m, stride, width, strip);
        for (int64_t j = 0; j < width; j += COLUMNS) weighted_squares(strip + j * m, m, weights, own + j);
        for (int64_t top = 0; top < m; top += ROWS) {
            int64_t end = least(m, top + ROWS);
            fetch(X + top * stride + left + STRIP, end - top, stride, least(STRIP, last - left - STRIP));
            for (int64_t j = 0; j < width; j += COLUMNS) add_squares(panel, strip + j * m, end, sums + j);
            panel += ROWS * end;
        }
        memcpy(of_product + left, sums, width * sizeof(float));
        memcpy(plain + left, own, width * sizeof(float));
    }
}
