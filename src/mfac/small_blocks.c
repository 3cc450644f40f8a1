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

static inline float sum_of(lanes v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* Row by row, each with zeros up to a multiple of STRIP; returns its length then. */
static int64_t copy_block(const blocks *G, int64_t index, float *g) {
    int64_t width = (G->length + STRIP - 1) / STRIP * STRIP;
    for (int64_t i = 0; i < G->m; i++) {
        memcpy(g + i * width, G->numbers + index * G->between_blocks + i * G->between_rows, G->length * sizeof(float));
        memset(g + i * width + G->length, 0, (width - G->length) * sizeof(float));
    }
    return width;
}

/* Two rows times four, of which `count` are there. */
static void dots(const float *a, const float *b, int64_t width, int64_t count, double *first, double *second) {
    lanes s[4] = {{0}}, t[4] = {{0}};
    const float *row[4];
    for (int64_t k = 0; k < 4; k++) row[k] = b + (k < count ? k : 0) * width;
    for (int64_t j = 0; j < width; j += LANES) {
        lanes x = load(a + j), y = load(a + width + j);
        for (int k = 0; k < 4; k++) {
            lanes z = load(row[k] + j);
            s[k] += x * z;
            t[k] += y * z;
        }
    }
    for (int64_t k = 0; k < count; k++) first[k] = sum_of(s[k]), second[k] = sum_of(t[k]);
}

/* The upper half of K; `g` has a row to spare behind an odd m. */
static void gram(const float *g, int64_t m, int64_t width, double *K) {
    for (int64_t i = 0; i < m; i += 2)
        for (int64_t j = i; j < m; j += 4) {
            double first[4], second[4];
            int64_t count = m - j < 4 ? m - j : 4;
            dots(g + i * width, g + j * width, width, count, first, second);
            memcpy(K + i * m + j, first, count * sizeof(double));
            /* Of the second row the number below the diagonal goes over one that is not used. */
            if (i + 1 < m) memcpy(K + (i + 1) * m + j, second, count * sizeof(double));
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
        int64_t end = top + PANEL < m ? top + PANEL : m;
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
 * `room` is for (m + 1) rows of a block and m doubles. */
int64_t factor(const blocks *G, double shift, double limit, int64_t first, int64_t last, double *room, double *U) {
    int64_t m = G->m;
    float *g = (float *)(room + m);
    for (int64_t index = first; index < last; index++) {
        double *S = U + index * m * m;
        gram(g, m, copy_block(G, index, g), S);
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

/* W = L⁻¹ G over STRIP columns of G, which it replaces, and the sums of squares of both over the rows. */
static void substitute(const float *L, int64_t m, int64_t width, float *g, float *whitened, float *plain) {
    lanes w2[VECTORS] = {{0}}, g2[VECTORS] = {{0}};
    for (int64_t i = 0; i < m; i++) {
        lanes sum[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            sum[v] = load(g + i * width + v * LANES);
            g2[v] += sum[v] * sum[v];
        }
        for (int64_t j = 0; j < i; j++)
            for (int v = 0; v < VECTORS; v++) sum[v] += L[i * m + j] * load(g + j * width + v * LANES);
        for (int v = 0; v < VECTORS; v++) {
            sum[v] *= L[i * m + i];
            w2[v] += sum[v] * sum[v];
            memcpy(g + i * width + v * LANES, &sum[v], sizeof sum[v]);
        }
    }
    memcpy(whitened, w2, sizeof w2);
    memcpy(plain, g2, sizeof g2);
}

/* Column sums of W² and of G² of the blocks from `first` to `last`; `room` is for m rows of a block and m x m numbers. */
void squares(const blocks *G, const double *U, int64_t first, int64_t last, float *room, float *whitened, float *plain) {
    int64_t m = G->m, n = G->length;
    float *L = room, *g = room + m * m;
    for (int64_t index = first; index < last; index++) {
        int64_t width = copy_block(G, index, g);
        prepare(U + index * m * m, m, L);
        for (int64_t left = 0; left < n; left += STRIP) {
            float w2[STRIP], g2[STRIP];
            int64_t count = n - left < STRIP ? n - left : STRIP;
            substitute(L, m, width, g + left, w2, g2);
            memcpy(whitened + index * n + left, w2, count * sizeof(float));
            memcpy(plain + index * n + left, g2, count * sizeof(float));
        }
    }
}
