/* Set-up and diagonal of many small blocks, each from G to its factor, and from there to its diagonal, in cache.
 *
 * Of every block: K = G Gᵀ in float32, S = s I + K and its factor in float64, W = L⁻¹ G in float32. The factor is kept
 * as U = Lᵀ, row behind row, which is L column behind column, as LAPACK has it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define VECTORS 8 /* of a strip of columns: as many sums as registers hold */
#define STRIP (LANES * VECTORS)
#define PANEL 4 /* rows of U that are made before the rest sees them */
#define ROWS 4  /* of a tile of K: with two vectors of columns, as many sums as products are under way at a time */
#define COLUMNS (2 * LANES)
#define CHUNK 128 /* columns of G whose products are summed in float32 */

typedef float lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *numbers; /* G of the first block */
    int64_t between_blocks, between_rows, m, length;
} blocks;

static inline lanes load(const float *at) {
    lanes value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows of G as panels of COLUMNS, each column by column; behind the last row zeros. */
static void pack(const float *g, int64_t m, int64_t stride, int64_t count, float *packed) {
    for (int64_t top = 0; top < m; top += COLUMNS, packed += CHUNK * COLUMNS, g += COLUMNS * stride)
        for (int64_t k = 0; k < count; k++) {
            float *to = packed + k * COLUMNS;
            if (top + COLUMNS <= m)
                for (int64_t i = 0; i < COLUMNS; i++) to[i] = g[i * stride + k];
            else
                for (int64_t i = 0; i < COLUMNS; i++) to[i] = top + i < m ? g[i * stride + k] : 0;
        }
}

/* ROWS rows of a panel times all of another, over `count` columns. */
static inline void multiply(const float *a, const float *b, int64_t count, float *out) {
    lanes s[ROWS][2] = {{{0}}};
    for (int64_t k = 0; k < count; k++, a += COLUMNS, b += COLUMNS) {
        lanes x = load(b), y = load(b + LANES);
        for (int r = 0; r < ROWS; r++) {
            s[r][0] += a[r] * x;
            s[r][1] += a[r] * y;
        }
    }
    memcpy(out, s, sizeof s);
}

/* Adds the products of packed rows to the upper half of K; some below the diagonal too, where nobody looks. */
static void add_gram(const float *packed, int64_t m, int64_t count, double *K) {
    for (int64_t right = 0; right < m; right += COLUMNS)
        for (int64_t top = 0; top < m && top < right + COLUMNS; top += ROWS) {
            float tile[ROWS][COLUMNS];
            const float *rows = packed + top / COLUMNS * CHUNK * COLUMNS + top % COLUMNS;
            multiply(rows, packed + right * CHUNK, count, tile[0]);
            for (int64_t i = 0; i < least(ROWS, m - top); i++)
                for (int64_t j = 0; j < least(COLUMNS, m - right); j++) K[(top + i) * m + right + j] += tile[i][j];
        }
}

/* The upper half of K: summed in float32 over CHUNK columns, in float64 from one chunk to the next. */
static void gram(const blocks *G, int64_t index, float *packed, double *K) {
    const float *g = G->numbers + index * G->between_blocks;
    memset(K, 0, G->m * G->m * sizeof(double));
    for (int64_t left = 0; left < G->length; left += CHUNK) {
        int64_t count = least(CHUNK, G->length - left);
        pack(g + left, G->m, G->between_rows, count, packed);
        add_gram(packed, G->m, count, K);
    }
}

/* The largest sum of sizes in a row of the symmetric matrix, which no eigenvalue exceeds; infinite if one is not finite. */
static double bound(const double *K, int64_t m, double *sums) {
    double most = 0;
    memset(sums, 0, m * sizeof(double));
    for (int64_t i = 0; i < m; i++) {
        double sum = 0;
        for (int64_t j = i + 1; j < m; j++) {
            double size = fabs(K[i * m + j]);
            sum += size;
            sums[j] += size;
        }
        sums[i] += sum + fabs(K[i * m + i]);
    }
    for (int64_t i = 0; i < m; i++) most = isfinite(sums[i]) ? fmax(most, sums[i]) : INFINITY;
    return most;
}

/* Takes the rows from `first` to `last` of U, times their entries in column i, from row i of S, right of the diagonal. */
static inline void eliminate(double *S, int64_t m, int64_t first, int64_t last, int64_t i) {
    double *restrict row = S + i * m;
    const double *restrict u = S + first * m;
    if (last - first == PANEL) {
        double a = u[i], b = u[m + i], c = u[2 * m + i], d = u[3 * m + i];
        for (int64_t j = i; j < m; j++)
            row[j] -= (a * u[j] + b * u[m + j]) + (c * u[2 * m + j] + d * u[3 * m + j]);
        return;
    }
    for (; first < last; first++, u += m)
        for (int64_t j = i; j < m; j++) row[j] -= u[i] * u[j];
}

/* U with UᵀU = S, over the upper half of S, and zeros below; whether S is positive definite. */
static int cholesky(double *S, int64_t m) {
    for (int64_t top = 0; top < m; top += PANEL) {
        int64_t end = least(m, top + PANEL);
        for (int64_t k = top; k < end; k++) {
            double *u = S + k * m;
            eliminate(S, m, top, k, k);
            if (!(u[k] > 0)) return 0;
            double root = sqrt(u[k]), inverse = 1 / root;
            u[k] = root;
            for (int64_t j = k + 1; j < m; j++) u[j] *= inverse;
            for (int64_t j = 0; j < k; j++) u[j] = 0;
        }
        for (int64_t i = end; i < m; i++) eliminate(S, m, top, end, i);
    }
    return 1;
}

/* U of the blocks from `first` to `last`; 0, and U is not to be used, where float32 is not enough by `limit`, or float64.
 *
 * `room` is for m doubles, and CHUNK numbers of as many rows as fill panels. */
int64_t factor(const blocks *G, double shift, double limit, int64_t first, int64_t last, double *room, double *U) {
    int64_t m = G->m;
    float *packed = (float *)(room + m);
    for (int64_t index = first; index < last; index++) {
        double *S = U + index * m * m;
        gram(G, index, packed, S);
        if (!(bound(S, m, room) <= limit)) return 0;
        for (int64_t i = 0; i < m; i++) S[i * m + i] += shift;
        if (!cholesky(S, m)) return 0;
    }
    return 1;
}

/* Rows of L below the diagonal with their signs changed, and 1/L_ii on it. */
static void prepare(const double *U, int64_t m, float *L) {
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < i; j++) L[i * m + j] = (float)-U[j * m + i];
        L[i * m + i] = (float)(1 / U[i * m + i]);
    }
}

/* Some of STRIP columns of G, zeros where the others would be. */
static void copy_strip(const float *g, int64_t m, int64_t stride, int64_t count, float *strip) {
    for (int64_t i = 0; i < m; i++) {
        memcpy(strip + i * STRIP, g + i * stride, count * sizeof(float));
        memset(strip + i * STRIP + count, 0, (STRIP - count) * sizeof(float));
    }
}

/* W = L⁻¹ G over STRIP columns, and the sums of squares of both over the rows; W may be where G is. */
static void substitute(
    const float *L, int64_t m, const float *g, int64_t stride, float *W, float *whitened, float *plain
) {
    lanes w2[VECTORS] = {{0}}, g2[VECTORS] = {{0}};
    for (int64_t i = 0; i < m; i++) {
        lanes sum[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            sum[v] = load(g + i * stride + v * LANES);
            g2[v] += sum[v] * sum[v];
        }
        for (int64_t j = 0; j < i; j++)
            for (int v = 0; v < VECTORS; v++) sum[v] += L[i * m + j] * load(W + j * STRIP + v * LANES);
        for (int v = 0; v < VECTORS; v++) {
            sum[v] *= L[i * m + i];
            w2[v] += sum[v] * sum[v];
            memcpy(W + i * STRIP + v * LANES, &sum[v], sizeof sum[v]);
        }
    }
    memcpy(whitened, w2, sizeof w2);
    memcpy(plain, g2, sizeof g2);
}

/* Column sums of W² and of G² of the blocks from `first` to `last`; `room` is for m x m numbers and m rows of a strip. */
void squares(const blocks *G, const double *U, int64_t first, int64_t last, float *room, float *whitened, float *plain) {
    int64_t m = G->m, n = G->length;
    float *L = room, *W = room + m * m;
    for (int64_t index = first; index < last; index++) {
        prepare(U + index * m * m, m, L);
        for (int64_t left = 0; left < n; left += STRIP) {
            const float *g = G->numbers + index * G->between_blocks + left;
            int64_t stride = G->between_rows, count = least(STRIP, n - left);
            float w2[STRIP], g2[STRIP];
            if (count < STRIP) {
                copy_strip(g, m, stride, count, W);
                g = W, stride = STRIP;
            }
            substitute(L, m, g, stride, W, w2, g2);
            memcpy(whitened + index * n + left, w2, count * sizeof(float));
            memcpy(plain + index * n + left, g2, count * sizeof(float));
        }
    }
}
