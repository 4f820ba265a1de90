/* The k largest absolutes of each row, and the sum of such rows.
 *
 * Lives here: the ops of kernels/select_top.py for a CPU, called by kernels/native.py, which says what they compute.
 * A sample of the row gives a bin that the k-th value is hardly below; one pass over memory keeps what is at least in
 * that bin, and the choice is among these. Where the sample misled, a second pass takes all values.
 */
#include <stdlib.h>

#include "values.h"

#define BIN_SHIFT 20
#define BINS 2048
#define SAMPLE_STEP 32 /* a run of values of every so many is sampled */
#define SAMPLE_RUN 64

typedef struct {
    float value;
    int32_t place;
} Candidate;

typedef struct {
    const float *x;
    const void *residual;
    Dtype dtype;
    int64_t from, m; /* the row's place in the tensors, its length */
} Row;

typedef struct {
    Candidate *candidates;
    int64_t count, not_finite;
    int64_t bins[BINS];
    double squares; /* of what is no candidate */
} Scan;

/* The bin that is expected to leave a quarter more than k candidates; 0 where the sample is too small to tell. */
static uint32_t expected_bin(Row row, int64_t k) {
    int64_t bins[BINS] = {0}, wanted = k / SAMPLE_STEP + k / (4 * SAMPLE_STEP) + 32;
    float total[SAMPLE_RUN];
    for (int64_t at = 0; at + SAMPLE_RUN <= row.m; at += SAMPLE_RUN * SAMPLE_STEP) {
        load_total(row.x + at, row.residual, row.dtype, row.from + at, SAMPLE_RUN, total);
        for (int i = 0; i < SAMPLE_RUN; i++) bins[(bits_of(total[i]) & ABSOLUTE) >> BIN_SHIFT]++;
    }
    uint32_t bin = BINS;
    for (int64_t found = 0; bin > 0 && found < wanted; found += bins[bin]) bin--;
    return bin;
}

/* Candidates are the values of bin `least` and above, in the row's order; all totals go to `totals` unless it is NULL. */
static void scan_row(Row row, uint32_t least, float *totals, Scan *scan) {
    const uint32_t floor = least << BIN_SHIFT;
    float total[CHUNK];
    scan->count = scan->not_finite = 0;
    scan->squares = 0;
    memset(scan->bins, 0, sizeof scan->bins);
    for (int64_t at = 0; at < row.m; at += CHUNK) {
        int64_t n = row.m - at < CHUNK ? row.m - at : CHUNK;
        scan->not_finite += load_total(row.x + at, row.residual, row.dtype, row.from + at, n, total);
        if (totals) store(total, n, totals, FP32, row.from + at);
        for (int64_t word = 0; word < n; word += WORD) {
            uint32_t found = at_least(total + word, floor);
            if (n - word < WORD) found &= (1u << (n - word)) - 1; /* behind the row's end */
            for (; found; found &= found - 1) {
                int64_t i = word + __builtin_ctz(found);
                scan->candidates[scan->count++] = (Candidate){total[i], (int32_t)(at + i)};
                scan->bins[(bits_of(total[i]) & ABSOLUTE) >> BIN_SHIFT]++;
                total[i] = 0;
            }
        }
        scan->squares += squares(total, n);
    }
}

static void zero_at(void *values, Dtype dtype, int64_t at) {
    if (dtype == FP32)
        ((float *)values)[at] = 0.0f;
    else if (dtype == BF16)
        ((uint16_t *)values)[at] = 0;
}

/* Of the candidates k into the wire, zero in the new residual; adds to the statistics. */
static void choose(const Scan *scan, int64_t k, float *values, int32_t *places, void *new_residual, Dtype new_dtype,
                   int64_t from, double *statistics) {
    int64_t bin = BINS, above = 0, chosen = 0;
    while (bin > 0 && above + scan->bins[bin - 1] <= k) above += scan->bins[--bin];
    int64_t left = k - above; /* of the bin below these */
    statistics[0] += scan->squares;
    statistics[1] += scan->squares;
    for (int64_t i = 0; i < scan->count; i++) {
        Candidate candidate = scan->candidates[i];
        int64_t of = (bits_of(candidate.value) & ABSOLUTE) >> BIN_SHIFT;
        double square = (double)candidate.value * (double)candidate.value;
        statistics[0] += square;
        if (of >= bin || (of == bin - 1 && left-- > 0)) {
            values[chosen] = candidate.value;
            places[chosen++] = candidate.place;
            zero_at(new_residual, new_dtype, from + candidate.place);
        } else {
            statistics[1] += square;
        }
    }
}

/* 0, or -1 where memory for the candidates isn't there. */
int32_t select_top(int64_t rows, int64_t m, int64_t k, const float *x, uint8_t *wire, const void *residual,
                   int32_t dtype, void *new_residual, int32_t new_dtype, double *statistics) {
    Scan *scan = malloc(sizeof *scan);
    /* Space for all: pages that are never written take no memory. */
    Candidate *candidates = malloc((size_t)(m ? m : 1) * sizeof *candidates);
    int32_t status = scan && candidates ? 0 : -1;
    for (int64_t i = 0; i < rows && status == 0; i++) {
        Row row = {x + i * m, residual, (Dtype)dtype, i * m, m};
        float *totals = new_dtype == FP32 ? new_residual : NULL;
        scan->candidates = candidates;
        scan_row(row, expected_bin(row, k), totals, scan);
        int64_t not_finite = scan->not_finite;
        if (scan->count < k) {
            Row again = totals ? (Row){totals + i * m, NULL, ABSENT, i * m, m} : row; /* the residual may be gone */
            scan_row(again, 0, NULL, scan);
        }
        if (new_dtype == BF16)
            for (int64_t at = 0; at < m; at += CHUNK) {
                float total[CHUNK];
                int64_t n = m - at < CHUNK ? m - at : CHUNK;
                load_total(row.x + at, residual, row.dtype, row.from + at, n, total);
                store(total, n, new_residual, BF16, row.from + at);
            }
        float *values = (float *)(wire + i * k * 8);
        choose(scan, k, values, (int32_t *)(values + k), new_residual, (Dtype)new_dtype, row.from, statistics);
        statistics[2] += (double)not_finite;
    }
    free(candidates);
    free(scan);
    return status;
}

/* 0, or -1 where a place is outside of `out`. */
int32_t scatter_sum(int64_t rows, int64_t m, int64_t k, const uint8_t *wire, float *out) {
    memset(out, 0, (size_t)m * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        const float *values = (const float *)(wire + row * k * 8);
        const int32_t *places = (const int32_t *)(values + k);
        for (int64_t i = 0; i < k; i++) {
            if (places[i] < 0 || places[i] >= m) return -1;
            out[places[i]] += values[i];
        }
    }
    return 0;
}
